"""Derives a `GraphIO` from a loaded graph's inputs and outputs.

Names, types and shapes come from the graph itself. The files that exporters write beside it come second:
genai_config.json for renamed inputs and outputs, config.json for sizes that the graph leaves open. `probe` runs the
graph to find out what neither says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...errors import BundleError
from ...models.json_file import is_whole
from .cache_io import find_cache, find_states, fixed_slots, unsupported
from .graph_io import (
    NUMPY_TYPES,
    CacheMode,
    CacheTensor,
    GraphIO,
    GraphValue,
    HeadInputs,
    InputRole,
    LogitsMode,
    StateTensor,
    TopOutputs,
)
from .model_metadata import ModelMetadata, reject_inputs

MIN_CAPACITY: Final = 8
"""Smallest number of cache slots that a graph may fix: with fewer it could not even be probed."""
_ROLES_BY_NAME: Final[Mapping[str, InputRole]] = {
    **dict.fromkeys(("input_ids", "token_ids", "tokens"), InputRole.TOKENS),
    **dict.fromkeys(("position_ids", "positions"), InputRole.POSITIONS),
    **dict.fromkeys(("attention_mask", "attn_mask"), InputRole.MASK),
    **dict.fromkeys(("attention_bias", "causal_mask"), InputRole.BIAS),
    **dict.fromkeys(("seqlens_k", "past_seq_len", "past_sequence_length"), InputRole.LAST_SLOT),
    **dict.fromkeys(("total_sequence_length", "total_seq_len", "current_sequence_length"), InputRole.TOTAL_LENGTH),
    "logit_rows": InputRole.LOGIT_POSITIONS,
    **dict.fromkeys(("num_logits_to_keep", "logits_to_keep"), InputRole.LOGITS_TO_KEEP),
    "use_cache_branch": InputRole.USE_CACHE,
}
_WINDOW_INPUT: Final = re.compile("(attention_bias|seqlens_k|total_sequence_length)_([1-9][0-9]{0,8})")
_HIDDEN_STATES: Final = ("hidden_states", "last_hidden_state")
"""Names of an output with hidden states: of edge-run and of GenAI's model builder, and of transformers."""
DRAFT_FEATURES: Final = "draft_features"
"""Name of a target's output, and of a draft head's input, with hidden states."""
_DRAFT_STATES: Final = "draft_states"
"""Name of a draft head's input with the states that it computed itself."""
_NEXT_STATES: Final = "next_states"
"""Name of a draft head's output with such states."""
_FORMS: Final[Mapping[InputRole, tuple[str, tuple[int, ...]]]] = {
    InputRole.TOKENS: ("i", (2,)),
    InputRole.POSITIONS: ("i", (2, 3)),
    InputRole.MASK: ("ifb", (2,)),
    InputRole.BIAS: ("fb", (4,)),
    InputRole.LAST_SLOT: ("i", (0, 1, 2)),
    InputRole.TOTAL_LENGTH: ("i", (0, 1, 2)),
    InputRole.LOGIT_POSITIONS: ("i", (1,)),
    InputRole.LOGITS_TO_KEEP: ("i", (0, 1)),
    InputRole.USE_CACHE: ("b", (0, 1)),
}
"""Element types, as NumPy's kind letters, and numbers of dimensions that an input of a role may have."""
_LAYERS_IN_GENAI: Final = re.compile("(past|present)_((key|value|conv|recurrent|ssm)_)?names")
"""Keys of genai_config.json that name a cache tensor or a state of every layer."""


def introspect(
    inputs: Sequence[GraphValue], outputs: Sequence[GraphValue], where: str, metadata: ModelMetadata
) -> GraphIO:
    """Find out what a graph's inputs and outputs mean, as far as they and the files beside the graph say.

    Args:
        inputs: the graph's inputs.
        outputs: the graph's outputs.
        where: names the file in errors.
        metadata: what the files beside the graph say.

    Raises:
        BundleError: the graph is not a decoder that edge-run can run; names the input or output that shows it.
    """
    head = _head_inputs(inputs) if metadata.draft_head else None
    head_names = set() if head is None else {head.features.name, head.states.name}
    reject_inputs([value for value in inputs if value.name not in head_names], where)
    usual = usual_names(metadata.genai, max(len(inputs), len(outputs)))
    states, state_types = find_states(inputs, outputs, where, usual)
    state_inputs = {tensor.past for tensor in states}
    state_outputs = {tensor.present for tensor in states}
    cache, layers = find_cache(
        [value for value in inputs if value.name not in state_inputs],
        [value for value in outputs if value.name not in state_outputs],
        where,
        usual,
        sizes_in_config(metadata.config, metadata.genai),
    )
    windows = _window_biases(inputs)
    window_names = {value.name for value in inputs if _WINDOW_INPUT.fullmatch(value.name)} if windows else set()
    roles = _roles(inputs, where, usual, {*(each.past for each in cache), *window_names, *state_inputs, *head_names})
    _check_cache(cache, states, where)
    if InputRole.TOKENS not in roles:
        raise unsupported(f"{where} has no input for token ids (input_ids)")
    _check_inputs(roles, where)
    logits = _logits(outputs, where, usual, {tensor.present for tensor in cache} | state_outputs)
    vocab_size, capacity = _vocab_size(logits, where, metadata), _capacity(cache, inputs, outputs, where)
    # Only GroupQueryAttention, which works in place, takes lengths as inputs.
    has_lengths = InputRole.LAST_SLOT in roles and InputRole.TOTAL_LENGTH in roles
    is_selected = InputRole.LOGIT_POSITIONS in roles
    return GraphIO(
        vocab_size=vocab_size,
        input_vocab=vocab_size if metadata.input_vocab is None else max(metadata.input_vocab, vocab_size),
        cache=cache,
        layers=layers,
        cache_mode=CacheMode.IN_PLACE if has_lengths or capacity is not None else CacheMode.GROWING,
        capacity=capacity,
        inputs=roles,
        logits=logits,
        logits_mode=_logits_mode(roles, logits),
        blocks=metadata.blocks,
        causal=metadata.blocks is None
        and (has_lengths or (metadata.operators is not None and "GroupQueryAttention" in metadata.operators)),
        window_biases=windows,
        hidden_states=_float_output(outputs, (_NEXT_STATES,) if head else _HIDDEN_STATES, 2 if is_selected else 3),
        draft_features=_float_output(outputs, (DRAFT_FEATURES,), 2),
        head=head,
        states=states,
        state_types=state_types,
        top=_top_outputs(outputs) if is_selected else None,
    )


def read_graph_io(graph: Path, model: bytes | None, metadata: ModelMetadata) -> GraphIO:
    """The inputs and outputs of a graph that is not loaded.

    Args:
        graph: its file.
        model: the serialized graph where it differs from the file.
        metadata: what the files beside it say.

    Raises:
        BundleError: the file is not a decoder that edge-run can run.
    """
    from ...models.onnx_file.model_messages import (  # noqa: PLC0415 -- importing protobuf takes 28 ms
        ELEMENT_TYPES,
        ModelProto,
        read_model,
        shape_of,
    )

    proto = (read_model(graph) if model is None else ModelProto.FromString(model)).graph
    constants = {each.name for each in proto.initializer}
    types = {ELEMENT_TYPES[dtype]: name for name, dtype in NUMPY_TYPES.items()}
    inputs, outputs = (
        [
            GraphValue(each.name, types.get(each.type.tensor_type.elem_type, ""), shape_of(each))
            for each in values
            if each.name not in constants
        ]
        for values in (proto.input, proto.output)
    )
    return introspect(inputs, outputs, str(graph), metadata)


def _decoder_section(genai: Mapping[str, Any]) -> Mapping[str, Any]:
    decoder = genai.get("decoder")
    return decoder if isinstance(decoder, Mapping) else {}


def usual_names(genai: Mapping[str, Any], layers: int) -> dict[str, str]:
    """The usual names of inputs and outputs, by the names that genai_config.json gives them, of so many layers."""
    decoder = _decoder_section(genai)
    usual: dict[str, str] = {}
    for named in (decoder.get("inputs"), decoder.get("outputs")):
        for key, name in named.items() if isinstance(named, Mapping) else ():
            if not isinstance(name, str):
                continue
            if _LAYERS_IN_GENAI.fullmatch(key) and name.count("%d") == 1:
                own = key.removesuffix("names")
                usual |= {name.replace("%d", str(layer)): f"{own}{layer}" for layer in range(layers)}
            elif key == "logits" or key in _ROLES_BY_NAME:
                usual[name] = key
    return usual


def _roles(
    inputs: Sequence[GraphValue], where: str, usual: Mapping[str, str], others: set[str]
) -> dict[InputRole, GraphValue]:
    """The inputs by their roles; `others` are known to have none."""
    roles: dict[InputRole, GraphValue] = {}
    unknown = []
    for value in inputs:
        if value.name in others:
            continue
        role = _ROLES_BY_NAME.get(usual.get(value.name, value.name))
        if role is InputRole.MASK and len(value.shape) == 4:
            role = InputRole.BIAS
        if role is None:
            unknown.append(value.name)
        elif role in roles:
            raise unsupported(f"{where} has two inputs of the same meaning: {roles[role].name} and {value.name}")
        else:
            roles[role] = value
    if unknown:
        raise unsupported(f"{where} has inputs that edge-run does not know: {', '.join(sorted(unknown))}")
    return roles


def _window_biases(inputs: Sequence[GraphValue]) -> dict[int, GraphValue]:
    """Biases of layers with a sliding window, by its size; see `GraphIO.window_biases`."""
    return {
        int(match[2]): value
        for value in inputs
        if (match := _WINDOW_INPUT.fullmatch(value.name)) and len(value.shape) == 4 and value.dtype == np.float32
    }


def _check_inputs(roles: Mapping[InputRole, GraphValue], where: str) -> None:
    for role, value in roles.items():
        kinds, ranks = _FORMS[role]
        rank = len(value.shape)
        if value.dtype.kind not in kinds or rank not in ranks:
            raise unsupported(
                f"{where} takes {value.name} as {value.type} of {rank} dimensions, which is not supported"
            )
        if role in (InputRole.TOKENS, InputRole.MASK, InputRole.POSITIONS):
            batch, length = value.shape[-2], value.shape[-1]
            if isinstance(batch, int) and batch != 1:
                raise unsupported(f"{where} has a fixed batch size of {batch} ({value.name})")
            if isinstance(length, int):
                tokens = "1 token" if length == 1 else f"{length} tokens"
                raise BundleError(
                    f"{where} takes exactly {tokens} per pass ({value.name}), as models for an NPU do",
                    "choose a variant of the model for the CPU",
                )


def _check_cache(cache: Sequence[CacheTensor], states: Sequence[StateTensor], where: str) -> None:
    """Check that a graph keeps keys and values.

    Raises:
        BundleError: it keeps states alone, or nothing.
    """
    if not cache and states:
        raise BundleError(
            f"{where} keeps states alone ({states[0].past}), no keys and values: no layer has attention",
            "choose a model with attention in some of its layers",
        )
    if not cache:
        raise BundleError(
            f"{where} has no key/value cache among its inputs: it processes the whole text for every token, or keeps "
            "its cache where it cannot be rewound",
            "export it with a cache (Optimum's task text-generation-with-past), or choose another variant of it",
        )


def _logits(outputs: Sequence[GraphValue], where: str, usual: Mapping[str, str], cache: set[str]) -> GraphValue:
    others = [value for value in outputs if value.name not in cache]
    by_type = [value for value in others if len(value.shape) in (2, 3) and value.dtype.kind == "f"]
    by_name = [each for each in outputs if usual.get(each.name, each.name) == "logits"]
    candidates = by_name or by_type
    if len(candidates) != 1 or candidates[0] not in by_type:
        given = ", ".join(value.name for value in others) or "nothing"
        raise unsupported(f"{where} has no output for logits of 2 or 3 dimensions; beside its cache it gives {given}")
    return candidates[0]


def _head_inputs(inputs: Sequence[GraphValue]) -> HeadInputs | None:
    """The inputs that only a draft head has; None if one is missing."""
    by_name = {value.name: value for value in inputs}
    features, states = by_name.get(DRAFT_FEATURES), by_name.get(_DRAFT_STATES)
    return None if features is None or states is None else HeadInputs(features, states)


def _float_output(outputs: Sequence[GraphValue], names: Sequence[str], rank: int) -> GraphValue | None:
    """The first output of one of these names with floats and that many dimensions, the last of a fixed size."""
    return next(
        (
            value
            for value in outputs
            if value.name in names
            and len(value.shape) == rank
            and isinstance(value.shape[-1], int)
            and value.dtype.kind == "f"
        ),
        None,
    )


def _top_outputs(outputs: Sequence[GraphValue]) -> TopOutputs | None:
    """The outputs with the highest logits of the selected positions; see `TopOutputs`."""
    by_name = {value.name: value for value in outputs}
    ids, values = by_name.get("top_ids"), by_name.get("top_logits")
    if ids is None or values is None or len(ids.shape) != 2 or ids.shape != values.shape:
        return None
    count, kinds = ids.shape[1], (ids.dtype.kind, values.dtype.kind)
    return TopOutputs(ids, values, count) if isinstance(count, int) and kinds == ("i", "f") else None


def _vocab_size(logits: GraphValue, where: str, metadata: ModelMetadata) -> int:
    sizes: tuple[Any, ...] = (logits.shape[-1], metadata.config.get("vocab_size"), metadata.genai.get("vocab_size"))
    for size in sizes:
        if is_whole(size, 1):
            return int(size)
    raise BundleError(f"{where} leaves the size of its vocabulary open", "put the model's config.json beside it")


def sizes_in_config(config: Mapping[str, Any], genai: Mapping[str, Any]) -> dict[int, int]:
    """Sizes of the head (1) and channel (3) dimensions of the cache, from genai_config.json or config.json."""
    decoder = _decoder_section(genai)
    query_heads = config.get("num_attention_heads", config.get("n_head"))
    hidden_size = config.get("hidden_size", config.get("n_embd"))
    kv_heads = decoder.get("num_key_value_heads", config.get("num_key_value_heads", query_heads))
    head_dim = decoder.get("head_size", config.get("head_dim"))
    if head_dim is None and is_whole(hidden_size, 1) and is_whole(query_heads, 1):
        head_dim = hidden_size // query_heads
    return {axis: size for axis, size in ((1, kv_heads), (3, head_dim)) if is_whole(size, 1)}


def _capacity(
    cache: Sequence[CacheTensor], inputs: Sequence[GraphValue], outputs: Sequence[GraphValue], where: str
) -> int | None:
    """Number of slots of a cache of fixed size; None if the size is open."""
    pasts, presents = {value.name: value for value in inputs}, {value.name: value for value in outputs}
    found = {tensor.past: fixed_slots(tensor, pasts, presents) for tensor in cache}
    fixed = {name: slots for name, (slots, _) in found.items() if slots is not None}
    if not fixed:
        return None
    name = next(iter(fixed))
    if not all(same for _, same in found.values()):
        raise BundleError(
            f"{where} takes a cache of exactly {fixed[name]} slots ({name}) and returns one of another size",
            "choose a variant of the model for the CPU",
        )
    capacity = min(fixed.values())
    if capacity < MIN_CAPACITY:
        raise unsupported(f"{where} has a cache of only {capacity} slots ({name}); the minimum is {MIN_CAPACITY}")
    return capacity


def _logits_mode(roles: Mapping[InputRole, GraphValue], logits: GraphValue) -> LogitsMode:
    if InputRole.LOGIT_POSITIONS in roles:
        return LogitsMode.SELECTED
    if len(logits.shape) == 2 or logits.shape[1] == 1:
        return LogitsMode.LAST
    return LogitsMode.LAST_N if InputRole.LOGITS_TO_KEEP in roles else LogitsMode.ALL
