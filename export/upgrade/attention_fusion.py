"""Replaces attention in plain operators, as PyTorch's exporter writes it, by one GroupQueryAttention a layer.

The rotary embedding becomes part of the operator if it is recognized. Lengths, positions and bias are wired afterwards
(`contract_inputs`).

Rotary position embedding is found in plain operators, with its cosines and sines. The search follows queries (or keys)
from the attention scores back to values that everything token-dependent passes through. What is between such a value
and the rotated heads is a subgraph with heads and positions as inputs and heads as output, and its meaning is found by
running it on made-up values (`subgraph_runner`). A rotation turns pairs of channels (x, y) into

    (x * cos - y * sin, y * cos + x * sin)

where cos and sin depend on the position and the pair only. Heads of x = 1, y = 0 therefore become the table itself,
with all frequency scaling and attention factors. Random heads must be rotated as the table says, at other lengths too:
otherwise the rotation depends on more than the position. Pairs are channels i and i + n/2 of the first n (GPT-NeoX,
LLaMA) or 2i and 2i + 1 (GPT-J); channels from n on are not rotated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple

import numpy as np

from ...errors import ExportError
from ...runtime.graph.attention_edits import rotated_halves
from ..checkpoint.source import Float32Array
from .attention_pattern import Attention, find_attention
from .decoder_io import PassShape
from .editable import MICROSOFT, EditableGraph
from .graph_parts import unsupported
from .plain_operators import fold_shapes, fuse_gelu, fuse_norms
from .subgraph_runner import SubgraphRunner, channels

_CHUNK: Final = 1024
"""Number of positions whose cosines and sines are computed in one run."""
_MAX_CANDIDATES: Final = 4
"""Number of values before the rotated heads that are tried as the unrotated heads."""
_TOLERANCE: Final = 1e-4


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """Cosines and sines by position."""

    cosines: Float32Array
    """[context, pairs]"""
    sines: Float32Array
    """[context, pairs]"""
    interleaved: bool
    """Whether pairs are channels 2i and 2i + 1."""

    @property
    def pairs(self) -> int:
        """Number of pairs of channels that are rotated."""
        return int(self.cosines.shape[1])

    def rotate(self, heads: Float32Array, positions: Sequence[int]) -> Float32Array:
        """Rotate heads [heads, new, head_dim] of tokens at these positions."""
        rotated: Float32Array = heads.copy()
        first, second = _split_pairs(heads, self.pairs, self.interleaved)
        cosines, sines = self.cosines[list(positions)], self.sines[list(positions)]
        rotated_first, rotated_second = _split_pairs(rotated, self.pairs, self.interleaved)
        rotated_first[:] = first * cosines - second * sines
        rotated_second[:] = second * cosines + first * sines
        return rotated


def _split_pairs(heads: Float32Array, pairs: int, interleaved: bool) -> tuple[Float32Array, Float32Array]:
    """Views of the first and second channels of the rotated pairs, [..., pairs] each."""
    first, second = rotated_halves(2 * pairs, interleaved=interleaved)
    return heads[..., first], heads[..., second]


Rotation = tuple[str, str, RotaryTable]
"""The rotary embedding of one layer: the unrotated queries, [1, heads, new, head_dim] or [1, new, heads, head_dim], the
unrotated keys, likewise, and the table."""


def find_rotation(
    runner: SubgraphRunner, attention: Attention, context: int, known: Iterable[RotaryTable]
) -> Rotation | None:
    """Find how a layer rotates its queries and keys.

    Args:
        runner: runs the graph.
        attention: the layer's attention.
        context: number of positions of the table.
        known: tables of earlier layers; one that fits is reused.

    Returns:
        The rotation; None if there is none, or it is not recognized.
    """
    for source in _candidates(runner, attention.key.new):
        key = _Path(runner, source, attention.key.new, attention.kv_heads, attention.head_dim)
        for table in chain(known, (key.table(context, interleaved) for interleaved in (False, True))):
            if table is None or not key.fits(table):
                continue
            for name in _candidates(runner, attention.query):
                if _Path(runner, name, attention.query, attention.heads, attention.head_dim).fits(table):
                    return name, source, table
            return None
    return None


def _candidates(runner: SubgraphRunner, name: str) -> Iterator[str]:
    """Values from which everything token-dependent in `name` is computed, nearest first."""
    frontier = {name}
    for _ in range(_MAX_CANDIDATES):
        while True:
            computed = {node: each for each in frontier if (node := runner.graph.producer(each)) is not None}
            if not computed:
                return
            latest = max(computed, key=runner.order.__getitem__)
            frontier.remove(computed[latest])
            frontier.update(runner.inputs(latest))
            if len(frontier) == 1:
                break
        yield next(iter(frontier))


class _Path(NamedTuple):
    """What is computed between heads that may be unrotated and the rotated heads."""

    runner: SubgraphRunner
    source: str
    """[1, heads, new, head_dim] or [1, new, heads, head_dim]."""
    rotated: str
    """[1, heads, new, head_dim]."""
    heads: int
    head_dim: int

    def run(self, heads: Float32Array, past: int) -> Float32Array | None:
        """What becomes of unrotated heads [heads, new, head_dim] after `past` tokens; None if that cannot be run."""
        new, shape = heads.shape[1], self.runner.shape(self.source)
        tokens_first = shape == (1, "new", self.heads, self.head_dim)
        if not tokens_first and shape != (1, self.heads, "new", self.head_dim):
            return None
        given = (heads.swapaxes(0, 1) if tokens_first else heads)[None]
        try:
            out = self.runner.run([self.rotated], PassShape(new, past), {self.source: given})[self.rotated]
        except ExportError:
            return None
        return out[0] if out.shape == (1, *heads.shape) else None

    def table(self, context: int, interleaved: bool) -> RotaryTable | None:
        """The result for first channels of 1 and second channels of 0."""
        heads = np.random.default_rng(0).uniform(1, 2, (self.heads, 2, self.head_dim)).astype(np.float32)
        # So late that the slowest pair has turned by more than rounding; channels after the last turned one stay.
        out = self.run(heads, context - 2)
        changed = np.flatnonzero(False if out is None else (out != heads).any(axis=(0, 1)))
        if not changed.size:
            return None
        halves: list[tuple[Float32Array, Float32Array]] = []
        pairs = (int(changed[-1]) + 2) // 2
        for start in range(0, context, _CHUNK):
            heads = np.zeros((self.heads, min(_CHUNK, context - start), self.head_dim), np.float32)
            _split_pairs(heads, pairs, interleaved)[0][:] = 1
            out = self.run(heads, start)
            if out is None:
                return None
            halves.append(_split_pairs(out[0].copy(), pairs, interleaved))
            if start == 0 and not self.fits(RotaryTable(*halves[0], interleaved)):
                return None
        cosines, sines = (np.concatenate(each) for each in zip(*halves, strict=True))
        return RotaryTable(cosines, sines, interleaved)

    def fits(self, table: RotaryTable) -> bool:
        """Whether random heads are rotated as the table says, at its start, its end and in between."""
        context = len(table.cosines)
        random = np.random.default_rng(1)
        starts = {int(each) for each in np.geomspace(1, context, 12)}
        for new, past in [(min(17, context), 0), *((1, start - 1) for start in sorted(starts))]:
            heads = random.standard_normal((self.heads, new, self.head_dim)).astype(np.float32)
            out = self.run(heads, past)
            expected = table.rotate(heads, range(past, past + new))
            if out is None or not np.allclose(out, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
                return False
        return True


_HEAD_MULTIPLE: Final = 8
"""GroupQueryAttention requires a number of channels per head that is a multiple of this."""
_OPEN_END: Final = 1 << 31
"""A Slice with at least this end has no end."""
_ROTARY_MULTIPLE: Final = 16
"""GroupQueryAttention rotates multiples of this many channels; other numbers are rotated before it."""


def fuse_operators(graph: EditableGraph, context: int) -> None:
    """Make shapes constants, and fuse norms, GELU and the attention of every layer with its rotary embedding.

    Args:
        graph: a decoder that computes in float32 and whose attention is written in plain operators.
        context: number of positions that the upgraded model will serve.

    Raises:
        BundleError: something in the place of attention is not recognized, or its heads have an unsupported size.
        ExportError: a part of the graph cannot be run.
    """
    fuse_gelu(graph)
    fuse_norms(graph)
    fold_shapes(graph, context)
    runner = SubgraphRunner(graph)
    layers = find_attention(runner, context)
    for attention in layers:
        if attention.head_dim % _HEAD_MULTIPLE:
            raise unsupported(
                f"the model's heads have {attention.head_dim} channels, "
                f"and fused attention requires a multiple of {_HEAD_MULTIPLE}"
            )
    tables: dict[RotaryTable, tuple[str, str]] = {}
    rotations = []
    for attention in layers:
        rotations.append(rotation := find_rotation(runner, attention, context, tables))
        if rotation is not None and (table := rotation[2]) not in tables:
            names = graph.add_tensor("rotary.cos", table.cosines), graph.add_tensor("rotary.sin", table.sines)
            tables[table] = names
    for attention, rotation in zip(layers, rotations, strict=True):
        _replace(runner, attention, rotation, tables)
    graph.sweep()


def pack_heads(graph: EditableGraph) -> None:
    """Give GroupQueryAttention the value that its query, key and value are cut from, if they fill it in this order."""
    for node in graph.nodes_of("GroupQueryAttention"):
        cuts = [cut for name in node.inputs[:3] if (cut := _cut(graph, name)) is not None]
        if len(cuts) < 3 or len({source for source, _, _ in cuts}) != 1:
            continue
        (_, start, query_end), (_, key_start, key_end), (_, value_start, value_end) = cuts
        adjacent = (start, key_start, value_start) == (0, query_end, key_end)
        # Key and value have the same width, in proportion to the query; the last cut may have no end.
        width = key_end - key_start
        in_proportion = width * node.attribute("num_heads") == query_end * node.attribute("kv_num_heads")
        if adjacent and in_proportion and (value_end >= _OPEN_END or value_end - value_start == width):
            graph.set_inputs(node, [cuts[0][0], "", "", *node.inputs[3:]])
    graph.sweep()


def _replace(
    runner: SubgraphRunner,
    attention: Attention,
    rotation: Rotation | None,
    tables: dict[RotaryTable, tuple[str, str]],
) -> None:
    graph, stem = runner.graph, f"layers.{attention.layer}"
    query, key, table = (attention.query, attention.key.new, None) if rotation is None else rotation
    values = {"query": query, "key": key, "value": attention.value.new}
    heads = [_merged_heads(runner, name, f"{stem}.{part}") for part, name in values.items()]
    inside = table is not None and 2 * table.pairs % _ROTARY_MULTIPLE == 0
    names = ("", "") if table is None else tables[table]
    if table is not None and not inside:
        for index, count in ((0, attention.heads), (1, attention.kv_heads)):
            heads[index] = graph.value(
                "RotaryEmbedding",
                [heads[index], "position_ids", *names],
                name=f"{heads[index]}.rotated",
                domain=MICROSOFT,
                num_heads=count,
                rotary_embedding_dim=2 * table.pairs,
                interleaved=int(table.interleaved),
            )
    node = graph.add(
        "GroupQueryAttention",
        [*heads, attention.key.past, attention.value.past, "", "", *(names if inside else ("", ""))],
        [f"{stem}.attended", f"{stem}.keys", f"{stem}.values"],
        domain=MICROSOFT,
        num_heads=attention.heads,
        kv_num_heads=attention.kv_heads,
        scale=attention.scale,
        softcap=attention.softcap or None,
        local_window_size=attention.window if attention.window > 0 else None,
        do_rotary=int(inside),
        rotary_interleaved=int(table.interleaved) if inside and table is not None else None,
    )
    graph.replace_uses(attention.merged, node.output(0))
    for cache, present in ((attention.key, node.output(1)), (attention.value, node.output(2))):
        # Only the graph output changes: a Shape of the old value still reads that.
        graph.set_output(graph.outputs[cache.present], present)


def _merged_heads(runner: SubgraphRunner, name: str, stem: str) -> str:
    """Heads [1, heads, new, head_dim] or [1, new, heads, head_dim] as [1, new, heads * head_dim].

    If they were split from such a value, that is returned.
    """
    graph = runner.graph
    while (before := _before_split(runner, name)) is not None:
        name = before
    shape = runner.shape(name) or ()
    if len(shape) == 3:
        return name
    if shape[1] != "new" and shape[1] != 1:
        name = graph.value("Transpose", [name], name=f"{stem}.rows", perm=[0, 2, 1, 3])
    return graph.value("Reshape", [name, [1, -1, channels(shape)]], name=stem)


def _before_split(runner: SubgraphRunner, name: str) -> str | None:
    """The value before one step of splitting it into heads; None if that step is something else."""
    node = runner.graph.producer_of(name, "Reshape", "Transpose", "Unsqueeze")
    shape = runner.shape(name)
    if node is None or shape is None or len(shape) != 4:
        return None
    if node.op == "Transpose":
        return node.input(0) if node.attribute("perm") == [0, 2, 1, 3] else None
    return node.input(0) if runner.shape(node.input(0)) == (1, "new", channels(shape)) else None


def _cut(graph: EditableGraph, name: str) -> tuple[str, int, int] | None:
    """The value that another is cut from along the last of three axes, and the bounds of the cut."""
    node = graph.producer_of(name, "Slice", "Split")
    if node is None:
        return None
    if node.op == "Split":
        widths = graph.integers(node.input(1)) if node.input(1) else node.attribute("split")
        if node.attribute("axis", 0) not in (-1, 2) or not widths:
            return None
        start = sum(widths[: node.outputs.index(name)])
        return node.input(0), start, start + widths[node.outputs.index(name)]
    given = (graph.integers(node.input(index)) if node.input(index) else [1] for index in range(1, 5))
    start, stop, axes, steps = given
    if start is None or stop is None or axes not in ([-1], [2]) or steps != [1] or start[0] < 0:
        return None
    return node.input(0), start[0], stop[0]
