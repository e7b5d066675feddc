"""Attention that an exporter wrote out in plain operators: where it stands, and what exactly it computes.

The way in is the cache. An output that joins a cache input with new rows is the keys or the values of a layer; the
product that reaches a `Softmax` is scores, the product after it the heads' outputs. What happens in between (scaling
on either side, a cap, masks built in whatever way, groups of heads, casts) is not read off the nodes but found by
experiment (`probe`):

- Scores that are all zero come out of the softmax as 1/n on the n keys that a row sees: that is the mask. It must be
  causal, perhaps within a window; a graph that was traced with one new row may let new rows see each other.
- Scores 0 and a between two keys come out with the log odds g(a): a line is a scale, a curve that levels off
  `cap * tanh(scale * a / cap)`.
- Random queries, keys and values must then give what attention with these numbers gives.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np

from ....errors import BundleError, ExportError
from ..edit.editable import EditableGraph, Node
from ..edit.tensors import Array
from .subgraph_probe import Moment, Probe

_HINT: Final = "such a graph cannot be upgraded; edge-run may run it as it is"
_AMPLITUDES: Final = 2.0 ** np.arange(-4, 22)
_READABLE: Final = 60.0
"""Log odds beyond which the lesser probability is near float32's smallest number."""
_RANDOM_MOMENT: Final = Moment(5, 6)
_LIKENESS: Final = 1e-3
"""How far a piece of a graph may be from what it is taken for, relative to what comes out."""
_LAYOUT: Final = frozenset({"Cast", "Expand", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze"})
_SCALING: Final = frozenset({"Cast", "Div", "Mul"})
_SCORING: Final = frozenset({"Add", "Cast", "Clip", "Div", "Max", "Min", "Mul", "Sub", "Tanh", "Where"})
_WEIGHING: Final = frozenset({"Cast", "Dropout", "Where"})


@dataclass(frozen=True)
class CachedRows:
    """The keys or the values of a layer."""

    past: str
    """Graph input [1, kv_heads, past, head_dim]."""
    new: str
    """The rows of this pass [1, kv_heads, rows, head_dim]."""
    present: str
    """Graph output: the two, one after the other."""


@dataclass(frozen=True)
class Attention:
    """One layer's attention as found."""

    layer: int
    key: CachedRows
    value: CachedRows
    query: str
    """Queries as they meet the keys, but for their scale, [1, heads, rows, head_dim]."""
    merged: str
    """What comes out, [1, rows, heads * head_dim]."""
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float
    """0 where there is none."""
    window: int
    """Newest positions that a row sees, its own included; -1: all."""


def find_attention(probe: Probe, context: int) -> list[Attention]:
    """Every layer's attention, by layer.

    Args:
        probe: over the graph, which must not have been changed since.
        context: positions that the upgraded model will serve; windows as long as that are none.

    Raises:
        BundleError: something in the place of attention is not recognised; the message says what.
    """
    graph = probe.graph
    cached = {each.present: each for each in _cached_rows(probe)}
    places = [place for node in graph.nodes_of("Softmax") if (place := _place(probe, node, cached)) is not None]
    places.sort(key=lambda place: probe.order[place.softmax])
    used = {each.present for place in places for each in (place.key, place.value)}
    unused = sorted(set(graph.outputs) - used - {"logits"})
    if unused or not places:
        what = f"the output {unused[0]} is no cache of an attention" if unused else "it has no attention with a cache"
        raise BundleError(f"the model's attention is not recognised: {what}", _HINT)
    return [_identify(probe, place, layer, context) for layer, place in enumerate(places)]


def single_source(
    probe: Probe, name: str, through: Collection[str], stops: Collection[str] = (), stop_op: str = ""
) -> str | None:
    """Walk from a value towards the tokens through operators with one input that depends on them.

    Returns:
        The first value that is one of `stops` or made by `stop_op`; None if the walk ends before.
    """
    while name not in stops:
        node = probe.graph.producer(name)
        if node is None:
            return None
        if stop_op and node.op == stop_op:
            return name
        followed = [each for each in node.inputs if each in probe.tokens_of]
        if node.op not in through or len(followed) != 1:
            return None
        name = followed[0]
    return name


@dataclass(frozen=True)
class _Place:
    key: CachedRows
    value: CachedRows
    query: str
    scores: str
    softmax: Node
    merged: str
    heads: int


def _cached_rows(probe: Probe) -> list[CachedRows]:
    """Outputs that join a cache input with new rows along the positions."""
    found = []
    for node in probe.graph.nodes_of("Concat"):
        if len(node.inputs) == 2 and node.input(0) in probe.graph.inputs and node.output(0) in probe.graph.outputs:
            extents = probe.extents(node.output(0))
            if extents is not None and len(extents) == 4 and extents[0] == 1 and extents[2] == "total":
                found.append(CachedRows(node.input(0), node.input(1), node.output(0)))
    return found


def _place(probe: Probe, softmax: Node, cached: dict[str, CachedRows]) -> _Place | None:
    """The attention around a softmax; None where it is something else."""
    graph = probe.graph
    scores = single_source(probe, softmax.input(0), _SCORING, stop_op="MatMul")
    product = None if scores is None else graph.producer(scores)
    context = _next_product(graph, softmax.output(0))
    if scores is None or product is None or context is None:
        return None
    key = single_source(probe, product.input(1), _LAYOUT | _SCALING, stops=cached)
    value = single_source(probe, context.input(1), _LAYOUT | _SCALING, stops=cached)
    shape = probe.extents(scores)
    if key is None or value is None or shape is None or shape[-2:] != ("rows", "total"):
        return None
    heads = int(np.prod([each for each in shape[:-2] if isinstance(each, int)]))
    width = cached_width(probe, value) * heads
    merged = context.output(0)
    while probe.extents(merged) != (1, "rows", width):
        readers = [node for node in graph.consumers(merged) if node.op not in ("Shape", "Size")]
        if len(readers) != 1 or readers[0].op not in _LAYOUT:
            return None
        merged = readers[0].output(0)
    query = _unscaled(probe, product.input(0))
    return _Place(cached[key], cached[value], query, scores, softmax, merged, heads)


def cached_width(probe: Probe, present: str) -> int:
    """Channels of a head in the cache."""
    extents = probe.extents(present)
    return extents[3] if extents is not None and isinstance(extents[3], int) else 0


def _next_product(graph: EditableGraph, weights: str) -> Node | None:
    """The product of the softmax's weights with the values."""
    while True:
        readers = [node for node in graph.consumers(weights) if node.op not in ("IsNaN", "Shape")]
        if len(readers) != 1:
            return None
        if readers[0].op == "MatMul":
            return readers[0]
        if readers[0].op not in _WEIGHING:
            return None
        weights = readers[0].output(0)


def _unscaled(probe: Probe, name: str) -> str:
    """The value behind multiplications by a single number."""
    while True:
        node = probe.graph.producer_of(name, *_SCALING)
        followed = [] if node is None else [each for each in node.inputs if each in probe.tokens_of]
        others = [] if node is None else [each for each in node.inputs if each not in probe.tokens_of]
        if len(followed) != 1 or not all(_is_number(probe, each) for each in others):
            return name
        name = followed[0]


def _is_number(probe: Probe, name: str) -> bool:
    extents = probe.extents(name)
    return extents is not None and set(extents) <= {1}


def _identify(probe: Probe, place: _Place, layer: int, context: int) -> Attention:
    keys = probe.extents(place.key.present)
    values = probe.extents(place.value.present)
    queries = probe.extents(place.query)
    if keys != values or keys is None or queries is None or queries[1:3] != (place.heads, "rows"):
        raise _unknown(layer, "its keys, values or queries are not heads of one size")
    kv_heads, head_dim = keys[1], keys[3]
    if not isinstance(kv_heads, int) or not isinstance(head_dim, int) or queries != (1, place.heads, "rows", head_dim):
        raise _unknown(layer, "its keys, values or queries are not heads of one size")
    try:
        window = _window(probe, place, layer, context)
        scale, softcap = _scale(probe, place, layer, kv_heads, head_dim)
        attention = Attention(
            layer=layer,
            key=place.key,
            value=place.value,
            query=place.query,
            merged=place.merged,
            heads=place.heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=scale,
            softcap=softcap,
            window=window,
        )
        _require_likeness(probe, attention, _seen(probe, place, layer, _RANDOM_MOMENT))
    except ExportError as error:
        raise _unknown(layer, error.what) from error
    return attention


def _window(probe: Probe, place: _Place, layer: int, context: int) -> int:
    """Length of the window that the mask leaves, or -1; what the last row of a full context sees tells it, shorter runs
    must agree."""
    seen = _seen(probe, place, layer, Moment(1, context - 1))[0]
    window = int(seen.sum())
    moments = [Moment(24, 0), Moment(9, 16)]
    if window < context:
        moments += [Moment(3, window), Moment(window + 2, 1)]
    for moment in (Moment(1, context - 1), *moments):
        slots = np.arange(moment.total)
        rows = slots[moment.past :, None]
        near = slots > rows - (window if window < context else moment.total)
        seen = _seen(probe, place, layer, moment)
        # A graph traced with one new row lets new rows see each other; what it was traced from does not.
        if not any(np.array_equal(seen, expected) for expected in (near & (slots <= rows), near)):
            raise _unknown(layer, "its mask is neither causal nor a sliding window")
    return window if window < context else -1


def _seen(probe: Probe, place: _Place, layer: int, moment: Moment) -> Array:
    """Which keys the rows see, bool [rows, total]."""
    extents = probe.extents(place.scores) or ()
    scores = np.zeros([moment.extent(each) for each in extents], np.float32)
    weights = probe.run([place.softmax.output(0)], moment, {place.scores: scores})[place.softmax.output(0)]
    weights = weights.reshape(-1, moment.rows, moment.total)
    seen: Array = weights[0] > 0
    even = seen / np.maximum(seen.sum(axis=-1, keepdims=True), 1)
    if not np.allclose(weights, even, rtol=_LIKENESS, atol=0):
        raise _unknown(layer, "it adds to the scores something other than a mask")
    return seen


def _scale(probe: Probe, place: _Place, layer: int, kv_heads: int, head_dim: int) -> tuple[float, float]:
    """Scale and cap of the scores; see the module."""
    moment = Moment(len(_AMPLITUDES), 2)
    query = np.zeros((1, place.heads, moment.rows, head_dim), np.float32)
    query[..., 0] = _AMPLITUDES
    key = np.zeros((1, kv_heads, moment.total, head_dim), np.float32)
    key[:, :, 1::2, 0] = 1  # of the two newest keys that a row sees, one has score a and one 0
    given = {place.query: query, place.key.present: key}
    weights = probe.run([place.softmax.output(0)], moment, given)[place.softmax.output(0)]
    weights = weights.reshape(-1, moment.rows, moment.total)[0].astype(np.float64)
    slots = np.arange(moment.past, moment.total)
    with np.errstate(divide="ignore"):
        odds = np.log(weights[slots - 2, slots - (slots + 1) % 2]) - np.log(weights[slots - 2, slots - slots % 2])
    readable = odds < _READABLE
    scale = float(odds[readable][-1] / _AMPLITUDES[readable][-1])
    cap = 0.0
    if readable[-1] and odds[-1] > 0:
        cap = float(odds[-1])
        middle = int(np.argmin(np.abs(odds - cap / 2)))
        scale = float(cap * np.arctanh(odds[middle] / cap) / _AMPLITUDES[middle])
    fitted = cap * np.tanh(scale * _AMPLITUDES / cap) if cap else scale * _AMPLITUDES
    if not scale > 0 or not np.allclose(odds[readable], fitted[readable], rtol=_LIKENESS, atol=_LIKENESS):
        raise _unknown(layer, "its scores are neither scaled nor capped in a known way")
    usual = head_dim**-0.5
    return (usual if abs(scale - usual) < 1e-5 * usual else scale), round(cap, 4)


def _require_likeness(probe: Probe, attention: Attention, seen: Array) -> None:
    """Compare random heads' outputs with what `attention` says of them; `seen` is what the rows see [rows, total]."""
    moment = _RANDOM_MOMENT
    random = np.random.default_rng(attention.layer)
    shape = (moment.total, attention.head_dim)
    query = random.standard_normal((attention.heads, moment.rows, attention.head_dim)).astype(np.float32)
    key, value = random.standard_normal((2, attention.kv_heads, *shape)).astype(np.float32)
    given = {attention.query: query[None], attention.key.present: key[None], attention.value.present: value[None]}
    merged = probe.run([attention.merged], moment, given)[attention.merged]
    group = attention.heads // attention.kv_heads
    scores = attention.scale * query @ np.repeat(key, group, axis=0).swapaxes(1, 2)
    if attention.softcap:
        scores = attention.softcap * np.tanh(scores / attention.softcap)
    weights = np.where(seen, np.exp(scores), 0)
    heads = weights / weights.sum(axis=-1, keepdims=True) @ np.repeat(value, group, axis=0)
    expected = heads.swapaxes(0, 1).reshape(1, moment.rows, -1)
    if not np.allclose(merged, expected, rtol=_LIKENESS, atol=_LIKENESS):
        raise _unknown(attention.layer, "it does not compute attention over its heads")


def _unknown(layer: int, what: str) -> BundleError:
    return BundleError(f"the model's attention in layer {layer} is not recognised: {what}", _HINT)
