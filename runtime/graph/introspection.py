"""From a loaded graph's ports to its `GraphIO`.

Names, types and shapes come from the graph itself. What exporters write beside it is asked second: genai_config.json
for names that were changed, config.json for sizes that the graph leaves open. What neither says is found out by running
the graph (`probe`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ...errors import BundleError
from ...models.json_file import is_whole
from .cache_io import Slot, find_cache, fixed_rows, slot_of
from .graph_io import CacheMode, CacheTensor, GraphIO, GraphValue, LogitsMode, Role, element_type
from .metadata import ModelMetadata
from .refusals import refuse_ports

LEAST_ROWS: Final = 8
"""Of a cache whose size the graph fixes; with fewer it could not even be tried out (`probe`)."""
_HINT: Final = "export the model with edge-run export, or choose another variant of it"
_NAMES: Final[Mapping[str, Role]] = {
    **dict.fromkeys(("input_ids", "token_ids", "tokens"), Role.TOKENS),
    **dict.fromkeys(("position_ids", "positions"), Role.POSITIONS),
    **dict.fromkeys(("attention_mask", "attn_mask"), Role.MASK),
    **dict.fromkeys(("attention_bias", "causal_mask"), Role.BIAS),
    **dict.fromkeys(("seqlens_k", "past_seq_len", "past_sequence_length"), Role.LAST_ROW),
    **dict.fromkeys(("total_sequence_length", "total_seq_len", "current_sequence_length"), Role.TOTAL),
    "logit_rows": Role.LOGIT_ROWS,
    **dict.fromkeys(("num_logits_to_keep", "logits_to_keep"), Role.LOGITS_TO_KEEP),
    "use_cache_branch": Role.USE_CACHE,
}
_RANKS: Final[Mapping[Role, tuple[int, ...]]] = {
    Role.TOKENS: (2,),
    Role.POSITIONS: (2, 3),
    Role.MASK: (2,),
    Role.BIAS: (4,),
    Role.LAST_ROW: (0, 1, 2),
    Role.TOTAL: (0, 1, 2),
    Role.LOGIT_ROWS: (1,),
    Role.LOGITS_TO_KEEP: (0, 1),
    Role.USE_CACHE: (0, 1),
}
_KINDS: Final[Mapping[Role, str]] = {
    **dict.fromkeys(Role, "i"),
    Role.MASK: "ifb",
    Role.BIAS: "fb",
    Role.USE_CACHE: "b",
}
"""Types that an input of a role may have, by NumPy's letters."""
_ROLES_IN_GENAI: Final[Mapping[str, Role]] = {
    "input_ids": Role.TOKENS,
    "position_ids": Role.POSITIONS,
    "attention_mask": Role.MASK,
    "past_sequence_length": Role.LAST_ROW,
    "current_sequence_length": Role.TOTAL,
    "total_sequence_length": Role.TOTAL,
}


def introspect(
    inputs: Sequence[GraphValue], outputs: Sequence[GraphValue], where: str, metadata: ModelMetadata
) -> GraphIO:
    """Find out what a graph's ports are, as far as they tell.

    Args:
        inputs: of the graph.
        outputs: of the graph.
        where: names the file in errors.
        facts: what is known beside.

    Raises:
        BundleError: the graph is not a decoder that edge-run can run; says by what that is seen.
    """
    refuse_ports(inputs, where)
    names, slots = _names_in_genai(metadata.genai, inputs, outputs)
    cache = find_cache(inputs, outputs, where, slots, _sizes(metadata))
    roles = _roles(inputs, where, names, {tensor.past for tensor in cache})
    if not cache:
        raise BundleError(
            f"{where} has no key/value cache among its inputs: it reads the whole text for every token, or keeps its "
            "cache where it cannot be rewound",
            "export it with a cache (Optimum's task text-generation-with-past), or choose another variant of it",
        )
    if Role.TOKENS not in roles:
        raise BundleError(f"{where} has no input for token ids (input_ids)", _HINT)
    _check_inputs(roles, where)
    logits = _logits(outputs, where, names, {tensor.present for tensor in cache})
    vocab_size = _vocab_size(logits, where, metadata)
    capacity = _capacity(cache, inputs, outputs, where)
    ours = Role.LAST_ROW in roles and Role.TOTAL in roles
    fused = metadata.operators is not None and "GroupQueryAttention" in metadata.operators
    return GraphIO(
        vocab_size=vocab_size,
        input_vocab=vocab_size if metadata.input_vocab is None else max(metadata.input_vocab, vocab_size),
        cache=cache,
        layers=len({(slots.get(tensor.past) or slot_of(tensor.past) or (0,))[0] for tensor in cache}),
        # Lengths as inputs are those of the operator that works in place.
        sharing=CacheMode.IN_PLACE if ours or capacity is not None else CacheMode.GROWING,
        capacity=capacity,
        inputs=roles,
        logits=logits,
        scores=_scores(roles, logits),
        causal=ours or fused,
    )


def _names_in_genai(
    genai: Mapping[str, Any], inputs: Sequence[GraphValue], outputs: Sequence[GraphValue]
) -> tuple[dict[str, Role | None], dict[str, Slot]]:
    """Ports that genai_config.json gives names: their roles (None: the logits), and the cache's slots."""
    decoder = genai.get("decoder")
    if not isinstance(decoder, Mapping):
        return {}, {}
    roles: dict[str, Role | None] = {}
    slots: dict[str, Slot] = {}
    usual = {
        "past_key_names": "past_key_values.%d.key",
        "past_value_names": "past_key_values.%d.value",
        "past_names": "past_%d",
        "present_key_names": "present.%d.key",
        "present_value_names": "present.%d.value",
        "present_names": "present_%d",
    }
    for section, ports in (("inputs", inputs), ("outputs", outputs)):
        named = decoder.get(section)
        if not isinstance(named, Mapping):
            continue
        known = {port.name for port in ports}
        for what, name in named.items():
            if not isinstance(name, str):
                continue
            if what in usual and name.count("%d") == 1:
                for layer in range(len(ports)):
                    slot = slot_of(usual[what] % layer)
                    if slot is not None and name.replace("%d", str(layer)) in known:
                        slots[name.replace("%d", str(layer))] = slot
            elif name in known and (what == "logits" or what in _ROLES_IN_GENAI):
                roles[name] = _ROLES_IN_GENAI.get(what)
    return roles, slots


def _roles(
    inputs: Sequence[GraphValue], where: str, names: Mapping[str, Role | None], cache: set[str]
) -> dict[Role, GraphValue]:
    roles: dict[Role, GraphValue] = {}
    unknown = []
    for port in inputs:
        if port.name in cache:
            continue
        role = names.get(port.name) or _NAMES.get(port.name)
        if role is Role.MASK and len(port.shape) == 4:
            role = Role.BIAS
        if role is None:
            unknown.append(port.name)
        elif role in roles:
            raise BundleError(f"{where} has two inputs for one thing: {roles[role].name} and {port.name}", _HINT)
        else:
            roles[role] = port
    if unknown:
        raise BundleError(f"{where} asks for inputs edge-run does not know: {', '.join(sorted(unknown))}", _HINT)
    return roles


def _check_inputs(roles: Mapping[Role, GraphValue], where: str) -> None:
    for role, port in roles.items():
        dtype = element_type(port)
        if dtype is None or dtype.kind not in _KINDS[role] or len(port.shape) not in _RANKS[role]:
            raise BundleError(
                f"{where} wants {port.name} as {port.type} of {len(port.shape)} dimensions, which is not supported",
                _HINT,
            )
        if role in (Role.TOKENS, Role.MASK, Role.POSITIONS):
            batch, length = port.shape[-2], port.shape[-1]
            if isinstance(batch, int) and batch != 1:
                raise BundleError(f"{where} works on {batch} texts at once ({port.name})", _HINT)
            if isinstance(length, int):
                tokens = "1 token" if length == 1 else f"{length} tokens"
                raise BundleError(
                    f"{where} takes exactly {tokens} a pass ({port.name}), as models for an NPU do",
                    "choose a variant of the model for the CPU",
                )


def _logits(outputs: Sequence[GraphValue], where: str, names: Mapping[str, Role | None], cache: set[str]) -> GraphValue:
    named = [port for port in outputs if port.name == "logits" or (port.name in names and names[port.name] is None)]
    floats = [
        port
        for port in outputs
        if port.name not in cache
        and len(port.shape) in (2, 3)
        and (dtype := element_type(port)) is not None
        and dtype.kind == "f"
    ]
    candidates = named or floats
    if len(candidates) != 1 or candidates[0] not in floats:
        found = ", ".join(port.name for port in outputs if port.name not in cache) or "nothing"
        raise BundleError(
            f"{where} has no output for logits of 2 or 3 dimensions; beside its cache it gives {found}", _HINT
        )
    return candidates[0]


def _vocab_size(logits: GraphValue, where: str, metadata: ModelMetadata) -> int:
    sizes: Iterator[Any] = iter((logits.shape[-1], metadata.config.get("vocab_size"), metadata.genai.get("vocab_size")))
    size = next((size for size in sizes if is_whole(size, 1)), None)
    if size is None:
        raise BundleError(f"{where} leaves the size of its vocabulary open", "put the model's config.json beside it")
    return int(size)


def _sizes(metadata: ModelMetadata) -> dict[int, int]:
    """What config.json or genai_config.json says of a cache's heads and their width."""
    config, decoder = metadata.config, metadata.genai.get("decoder")
    decoder = decoder if isinstance(decoder, Mapping) else {}
    query_heads = config.get("num_attention_heads", config.get("n_head"))
    hidden = config.get("hidden_size", config.get("n_embd"))
    heads = decoder.get("num_key_value_heads", config.get("num_key_value_heads", query_heads))
    width = decoder.get("head_size", config.get("head_dim"))
    if width is None and is_whole(hidden, 1) and is_whole(query_heads, 1):
        width = hidden // query_heads
    return {at: size for at, size in ((1, heads), (3, width)) if is_whole(size, 1)}


def _capacity(
    cache: Sequence[CacheTensor], inputs: Sequence[GraphValue], outputs: Sequence[GraphValue], where: str
) -> int | None:
    """Rows of a cache of fixed size; None where it is open."""
    ins, outs = {port.name: port for port in inputs}, {port.name: port for port in outputs}
    found = {tensor.past: fixed_rows(tensor, ins, outs) for tensor in cache}
    sizes = {rows for rows, _ in found.values()}
    if sizes == {None}:
        return None
    fixed = next(name for name, (rows, _) in found.items() if rows is not None)
    if not all(same for _, same in found.values()):
        raise BundleError(
            f"{where} takes a cache of exactly {found[fixed][0]} rows ({fixed}) and gives another size back",
            "choose a variant of the model for the CPU",
        )
    capacity = min(rows for rows, _ in found.values() if rows is not None)
    if capacity < LEAST_ROWS:
        raise BundleError(f"{where} has a cache of {capacity} rows ({fixed}), which no text fits", _HINT)
    return capacity


def _scores(roles: Mapping[Role, GraphValue], logits: GraphValue) -> LogitsMode:
    if Role.LOGIT_ROWS in roles:
        return LogitsMode.CHOSEN
    if len(logits.shape) == 2 or logits.shape[1] == 1:
        return LogitsMode.LAST
    return LogitsMode.SUFFIX if Role.LOGITS_TO_KEEP in roles else LogitsMode.ALL
