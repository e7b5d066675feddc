"""Finds attention in plain operators, and determines what exactly it computes.

The search starts at the caches. An output that joins a cache input with new slots is the keys or the values of a layer;
the product before a `Softmax` computes scores, and the product after it the output of the heads. What is in between
(scaling on either side, a soft cap, masks of any construction, groups of heads, casts) is not read from the nodes but
found by running them on made-up values (`subgraph_runner`):

- Scores that are all zero become 1/n in the softmax for the n keys that a token sees: that is the mask. It must be
  causal, possibly with a sliding window. A graph that was traced with one new token may let new tokens see each other.
- The log odds g(a) of two keys with scores 0 and a give the scale if they are a line, and a soft cap
  `cap * tanh(scale * a / cap)` if they are a curve that levels off.
- Random queries, keys and values must then give what attention with these numbers computes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from ...errors import BundleError, ExportError
from .decoder_io import CacheTensor, PassShape, joined_caches
from .editable import Node
from .graph_parts import Array
from .subgraph_runner import SubgraphRunner, channels, sizes

_HINT: Final = "such a graph cannot be upgraded; edge-run may run it as it is"
_AMPLITUDES: Final = 2.0 ** np.arange(-4, 22)
"""Scores of one of two keys, from which scale and soft cap are fitted."""
_MAX_LOG_ODDS: Final = 60.0
"""Log odds beyond which the smaller probability is near float32's smallest number."""
_RANDOM_PASS: Final = PassShape(5, 6)
_TOLERANCE: Final = 1e-3
"""Largest relative difference between what a subgraph computes and what it is recognized as."""
_LAYOUT: Final = frozenset({"Cast", "Expand", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze"})
_SCALING: Final = frozenset({"Cast", "Div", "Mul"})
_BEFORE_SOFTMAX: Final = frozenset({"Add", "Cast", "Clip", "Div", "Max", "Min", "Mul", "Sub", "Tanh", "Where"})
_AFTER_SOFTMAX: Final = frozenset({"Cast", "Dropout", "Where"})


@dataclass(frozen=True)
class Attention:
    """The attention of one layer, as it was found."""

    key: CacheTensor
    value: CacheTensor
    """Both are [1, kv_heads, slots, head_dim]."""
    query: str
    """Queries that are multiplied with the keys, before scaling, [1, heads, new, head_dim]."""
    scores: str
    """Product of queries and keys, as the graph computes it."""
    softmax: Node
    merged: str
    """Output of all heads, [1, new, heads * head_dim]."""
    heads: int
    layer: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    scale: float = 0.0
    softcap: float = 0.0
    """Soft cap of the scores; 0 if there is none."""
    window: int = -1
    """Number of newest positions that a token sees, itself included; -1 for all."""


def find_attention(runner: SubgraphRunner, context: int) -> list[Attention]:
    """Find the attention of every layer.

    Args:
        runner: runs the graph, which must not have been changed since.
        context: number of positions that the upgraded model will serve; a window of at least this size has no effect.

    Returns:
        The attentions in layer order.

    Raises:
        BundleError: something in the place of attention is not recognized; the message says what.
    """
    graph = runner.graph
    shapes = {each: runner.shape(each.present) or () for each in joined_caches(graph)}
    cached = {
        each.present: each for each, shape in shapes.items() if len(shape) == 4 and (shape[0], shape[2]) == (1, "total")
    }
    sites = [site for node in graph.nodes_of("Softmax") if (site := _site(runner, node, cached)) is not None]
    sites.sort(key=lambda site: runner.order[site.softmax])
    used = {each.present for site in sites for each in (site.key, site.value)}
    unused = sorted(set(graph.outputs) - used - {"logits"})
    if unused or not sites:
        what = f"the output {unused[0]} is not a cache of an attention" if unused else "no attention has a cache"
        raise BundleError(f"the model's attention is not recognized: {what}", _HINT)
    return [_identify(runner, site, layer, context) for layer, site in enumerate(sites)]


def _single_source(runner: SubgraphRunner, name: str, through: Collection[str], ends: Collection[str]) -> str | None:
    """Follow a value back towards the tokens, through operators with one input that depends on them.

    Returns:
        The first value among `ends`; None if there is none.
    """
    while name not in ends:
        node = runner.graph.producer_of(name, *through)
        followed = [] if node is None else runner.inputs(node)
        if len(followed) != 1:
            return None
        name = followed[0]
    return name


def _site(runner: SubgraphRunner, softmax: Node, cached: dict[str, CacheTensor]) -> Attention | None:
    """The attention around a softmax; None if the softmax is not that of an attention."""
    graph = runner.graph
    products = {name for node in graph.nodes_of("MatMul") for name in node.outputs}
    scores = _single_source(runner, softmax.input(0), _BEFORE_SOFTMAX, products)
    product = None if scores is None else graph.producer(scores)
    if scores is None or product is None:
        return None
    weighted, probs = None, softmax.output(0)
    while weighted is None or weighted.op != "MatMul":  # the product of the probabilities with the values
        weighted = graph.sole_reader(probs, "MatMul", *_AFTER_SOFTMAX, besides=("CastLike", "IsNaN", "Shape"))
        if weighted is None:
            return None
        probs = weighted.output(0)
    key = _single_source(runner, product.input(1), _LAYOUT | _SCALING, cached)
    value = _single_source(runner, weighted.input(1), _LAYOUT | _SCALING, cached)
    shape = runner.shape(scores)
    if key is None or value is None or shape is None or shape[-2:] != ("new", "total"):
        return None
    heads = channels(shape[:-2])
    width = channels((runner.shape(value) or ())[3:]) * heads
    merged = weighted.output(0)
    while runner.shape(merged) != (1, "new", width):
        reader = graph.sole_reader(merged, *_LAYOUT, besides=("Shape", "Size"))
        if reader is None:
            return None
        merged = reader.output(0)
    query = product.input(0)
    while (node := graph.producer_of(query, *_SCALING)) is not None:  # multiplications by single numbers
        followed = runner.inputs(node)
        shapes = [runner.shape(each) for each in node.inputs if each not in followed]
        if len(followed) != 1 or not all(shape is not None and set(shape) <= {1} for shape in shapes):
            break
        query = followed[0]
    return Attention(cached[key], cached[value], query, scores, softmax, merged, heads)


def _identify(runner: SubgraphRunner, site: Attention, layer: int, context: int) -> Attention:
    keys = runner.shape(site.key.present) or ()
    _, kv_heads, _, head_dim = keys
    same = keys == runner.shape(site.value.present) and runner.shape(site.query) == (1, site.heads, "new", head_dim)
    if not same or not isinstance(kv_heads, int) or not isinstance(head_dim, int):
        raise _unknown(layer, "its keys, values or queries are not heads of one size")
    site = replace(site, layer=layer, kv_heads=kv_heads, head_dim=head_dim)
    try:
        window = sliding_window(partial(_visible_keys, runner, site), context)
        if window is None:
            raise _unknown(layer, "its mask is neither causal nor a sliding window")
        scale, softcap = _scale(runner, site)
        attention = replace(site, scale=scale, softcap=softcap, window=window)
        _require_attention(runner, attention, _visible_keys(runner, site, _RANDOM_PASS))
    except ExportError as error:
        raise _unknown(layer, error.what) from error
    return attention


def sliding_window(visible: Callable[[PassShape], Array], context: int) -> int | None:
    """Sliding window of a mask.

    The number of keys that the last token of a full context sees is the window. Shorter passes must agree with it.

    Args:
        visible: which keys each new token of a pass sees, bool [new, total].
        context: number of positions; a window of at least this size has no effect.

    Returns:
        Number of newest positions that a token sees, itself included; -1 for all; None if the mask is neither causal
        nor a sliding window.
    """
    window = int(visible(PassShape(1, context - 1))[0].sum())
    passes = [PassShape(1, context - 1), PassShape(24, 0), PassShape(9, 16)]
    if window < context:
        passes += [PassShape(3, window), PassShape(window + 2, 1)]
    for lengths in passes:
        slots = np.arange(lengths.total)
        queries = slots[lengths.past :, None]
        near = slots > queries - (window if window < context else lengths.total)
        seen = visible(lengths)
        # A graph traced with one new token lets new tokens see later ones; its source model does not.
        if not any(np.array_equal(seen, expected) for expected in (near & (slots <= queries), near)):
            return None
    return window if window < context else -1


def _visible_keys(runner: SubgraphRunner, site: Attention, lengths: PassShape) -> Array:
    """Which keys each new token sees, bool [new, total]."""
    shape = runner.shape(site.scores) or ()
    scores = np.zeros(sizes(shape, lengths), np.float32)
    probs = runner.run([site.softmax.output(0)], lengths, {site.scores: scores})[site.softmax.output(0)]
    probs = probs.reshape(-1, lengths.new, lengths.total)
    seen: Array = probs[0] > 0
    uniform = seen / np.maximum(seen.sum(axis=-1, keepdims=True), 1)
    if not np.allclose(probs, uniform, rtol=_TOLERANCE, atol=0):
        raise _unknown(site.layer, "something other than a mask is added to its scores")
    return seen


def _scale(runner: SubgraphRunner, site: Attention) -> tuple[float, float]:
    """Scale and soft cap of the scores; see the module docstring."""
    lengths = PassShape(len(_AMPLITUDES), 2)
    query = np.zeros((1, site.heads, lengths.new, site.head_dim), np.float32)
    query[..., 0] = _AMPLITUDES
    key = np.zeros((1, site.kv_heads, lengths.total, site.head_dim), np.float32)
    key[:, :, 1::2, 0] = 1  # of the two newest keys that a token sees, one has score a and one 0
    given = {site.query: query, site.key.present: key}
    probs = runner.run([site.softmax.output(0)], lengths, given)[site.softmax.output(0)]
    probs = probs.reshape(-1, lengths.new, lengths.total)[0].astype(np.float64)
    slots = np.arange(lengths.past, lengths.total)
    with np.errstate(divide="ignore"):
        odds = np.log(probs[slots - 2, slots - (slots + 1) % 2]) - np.log(probs[slots - 2, slots - slots % 2])
    usable = odds < _MAX_LOG_ODDS
    scale = float(odds[usable][-1] / _AMPLITUDES[usable][-1])
    cap = 0.0
    if usable[-1] and odds[-1] > 0:
        cap = float(odds[-1])
        middle = int(np.argmin(np.abs(odds - cap / 2)))
        scale = float(cap * np.arctanh(odds[middle] / cap) / _AMPLITUDES[middle])
    fitted = cap * np.tanh(scale * _AMPLITUDES / cap) if cap else scale * _AMPLITUDES
    if not scale > 0 or not np.allclose(odds[usable], fitted[usable], rtol=_TOLERANCE, atol=_TOLERANCE):
        raise _unknown(site.layer, "its scores are neither scaled nor capped in a known way")
    usual = site.head_dim**-0.5
    return (usual if abs(scale - usual) < 1e-5 * usual else scale), round(cap, 4)


def _require_attention(runner: SubgraphRunner, attention: Attention, seen: Array) -> None:
    """Compare the output for random heads with what `attention` computes; `seen` is the mask, bool [new, total]."""
    lengths = _RANDOM_PASS
    random = np.random.default_rng(attention.layer)
    shape = (lengths.total, attention.head_dim)
    query = random.standard_normal((attention.heads, lengths.new, attention.head_dim)).astype(np.float32)
    key, value = random.standard_normal((2, attention.kv_heads, *shape)).astype(np.float32)
    given = {attention.query: query[None], attention.key.present: key[None], attention.value.present: value[None]}
    merged = runner.run([attention.merged], lengths, given)[attention.merged]
    group = attention.heads // attention.kv_heads
    scores = attention.scale * query @ np.repeat(key, group, axis=0).swapaxes(1, 2)
    if attention.softcap:
        scores = attention.softcap * np.tanh(scores / attention.softcap)
    weights = np.where(seen, np.exp(scores), 0)
    heads = weights / weights.sum(axis=-1, keepdims=True) @ np.repeat(value, group, axis=0)
    expected = heads.swapaxes(0, 1).reshape(1, lengths.new, -1)
    if not np.allclose(merged, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
        raise _unknown(attention.layer, "it does not compute attention over its heads")


def _unknown(layer: int, what: str) -> BundleError:
    return BundleError(f"the model's attention in layer {layer} is not recognized: {what}", _HINT)
