"""What a decoder graph's inputs and outputs are, found by looking at them.

Names, types and shapes come from the loaded graph itself; nothing is believed from file names or metadata. The contract
this version reads is `docs/graph-contract.md`: one graph for prefill, decode and tree verification.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..edge.errors import BundleError

_PAST: Final = re.compile(r"past_key_values\.(\d+)\.(key|value)")
_REQUIRED: Final = ("input_ids", "seqlens_k", "total_sequence_length", "logit_rows")
_HINT: Final = "export the checkpoint with edge-run export"


@dataclass(frozen=True)
class Port:
    """One graph input or output: ONNX type string such as `tensor(float)`, dimensions as numbers or symbols."""

    name: str
    type: str
    shape: tuple[int | str | None, ...]


@dataclass(frozen=True)
class GraphSpec:
    """The ports of a decoder graph that keeps its cache in place."""

    vocab_size: int
    """Tokens the head tells apart: the last dimension of the logits."""
    input_vocab: int
    """Tokens the embedding has; more than `vocab_size` where the head of a draft model is trimmed."""
    layers: int
    kv_heads: int
    head_dim: int
    takes_positions: bool
    """Whether `position_ids` is an input: tree siblings can then share a position."""
    takes_bias: bool
    """Whether `attention_bias` is an input: token trees can then be verified."""

    @property
    def cache_inputs(self) -> tuple[str, ...]:
        """Names of the cache inputs, keys first, in the order of the arena's slices."""
        return tuple(f"past_key_values.{i}.{kind}" for kind in ("key", "value") for i in range(self.layers))

    @property
    def cache_outputs(self) -> tuple[str, ...]:
        """Names of the cache outputs, in the order of `cache_inputs`."""
        return tuple(f"present.{i}.{kind}" for kind in ("key", "value") for i in range(self.layers))


def introspect(
    inputs: Sequence[Port], outputs: Sequence[Port], where: str, input_vocab: int | None = None
) -> GraphSpec:
    """Find out what a graph's ports are.

    Args:
        inputs: of the graph.
        outputs: of the graph.
        where: names the file in errors.
        input_vocab: tokens the embedding has, which no port shows; as many as the head's when None.

    Raises:
        BundleError: the graph is not a decoder with a cache kept in place; says which port is missing or unfit.
    """
    ins = {port.name: port for port in inputs}
    outs = {port.name: port for port in outputs}
    layers = sorted({int(match[1]) for name in ins if (match := _PAST.fullmatch(name))})
    if not layers:
        raise BundleError(f"{where} has no key/value cache inputs (past_key_values.N.key)", _HINT)
    if missing := [name for name in _REQUIRED if name not in ins]:
        raise BundleError(f"{where} lacks the graph inputs {', '.join(missing)}", _HINT)
    if "logits" not in outs:
        raise BundleError(f"{where} has no output named logits", _HINT)

    first = ins.get(f"past_key_values.{layers[0]}.key")
    if first is None or len(first.shape) != 4:
        raise BundleError(f"{where}: the cache of layer {layers[0]} is not [1, heads, capacity, head size]", _HINT)
    _, kv_heads, _, head_dim = first.shape
    vocab_size = outs["logits"].shape[-1] if outs["logits"].shape else None
    if not (isinstance(kv_heads, int) and isinstance(head_dim, int) and isinstance(vocab_size, int)):
        raise BundleError(f"{where} leaves cache heads, head size or vocabulary size open", _HINT)

    spec = GraphSpec(
        vocab_size=vocab_size,
        input_vocab=vocab_size if input_vocab is None else input_vocab,
        layers=len(layers),
        kv_heads=kv_heads,
        head_dim=head_dim,
        takes_positions="position_ids" in ins,
        takes_bias="attention_bias" in ins,
    )
    _check_cache(spec, ins, outs, where)
    known = {*_REQUIRED, "position_ids", "attention_bias", *spec.cache_inputs}
    if unknown := sorted(set(ins) - known):
        raise BundleError(f"{where} asks for inputs edge-run does not know: {', '.join(unknown)}", _HINT)
    return spec


def _check_cache(spec: GraphSpec, ins: dict[str, Port], outs: dict[str, Port], where: str) -> None:
    for name, ports in ((n, p) for names, p in ((spec.cache_inputs, ins), (spec.cache_outputs, outs)) for n in names):
        port = ports.get(name)
        if port is None:
            raise BundleError(f"{where} lacks {name}", _HINT)
        if port.type != "tensor(float)":
            raise BundleError(f"{where}: {name} is {port.type}; only float32 caches are read", _HINT)
        if len(port.shape) != 4 or (port.shape[1], port.shape[3]) != (spec.kv_heads, spec.head_dim):
            raise BundleError(
                f"{where}: {name} is shaped {list(port.shape)}, expected [1, {spec.kv_heads}, capacity, "
                f"{spec.head_dim}] as in the first layer",
                _HINT,
            )
