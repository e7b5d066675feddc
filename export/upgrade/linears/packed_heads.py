"""Queries, keys and values that one linear makes side by side go into attention as they are."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from ..edit.editable import EditableGraph, Node

_OPEN_END: Final = 1 << 31


def pack_heads(graph: EditableGraph) -> None:
    """Let GroupQueryAttention read the whole of what its three inputs are cut from, in this order without a rest."""
    for node in graph.nodes_of("GroupQueryAttention"):
        cuts = [_cut(graph, name) for name in node.inputs[:3]]
        known = [cut for cut in cuts if cut is not None]
        if len(known) < 3 or len({source for source, _, _ in known}) != 1:
            continue
        bounds = [(start, stop) for _, start, stop in known]
        follows = all(before[1] == after[0] for before, after in pairwise(bounds))
        if bounds[0][0] == 0 and follows and _ends(node, bounds):
            graph.set_inputs(node, [known[0][0], "", "", *node.inputs[3:]])
    graph.sweep()


def _cut(graph: EditableGraph, name: str) -> tuple[str, int, int] | None:
    """The value that another is a part of along the last of three axes, and the part's bounds."""
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


def _ends(node: Node, bounds: list[tuple[int, int]]) -> bool:
    """Whether the last part is as wide as the one before it, its end being open perhaps."""
    (first, second), (start, stop) = bounds[1:]
    heads, kv_heads = node.attribute("num_heads"), node.attribute("kv_num_heads")
    width = second - first
    return width * heads == bounds[0][1] * kv_heads and (stop >= _OPEN_END or stop - start == width)
