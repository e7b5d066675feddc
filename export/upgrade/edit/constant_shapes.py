"""What a graph works out at every pass although it is always the same becomes a constant.

A graph exported for any batch asks values for their extents and puts shapes and bounds together again, several nodes
for each reshape. For one sequence every extent but the number of rows is known, and that one is what is left over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from ....errors import ExportError
from ..patterns.subgraph_probe import Extent, Moment, Probe
from .editable import EditableGraph, Node
from .tensors import Array

_MOMENTS: Final = (Moment(5, 9), Moment(3, 17))
_MANY_ROWS: Final = 1 << 10
_ARRANGING: Final = frozenset({"Expand", "Pad", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Unsqueeze"})
"""Operators that arrange their first input as the others say."""


def settle(graph: EditableGraph, context: int) -> None:
    """Make shapes and bounds constants, and take away reshapes that change nothing or are undone again.

    What is the same at first may change in a long text (where a window begins), so a full `context` is looked at too.
    """
    probe = Probe(graph)
    for node in graph.nodes_of("Reshape"):
        extents = probe.extents(node.output(0))
        if node.input(1) not in graph.tensors and extents is not None and (shape := _shape(extents)) is not None:
            graph.set_input(node, 1, graph.add_tensor("shape.settled", np.array(shape, np.int64)))
    rows = min(_MANY_ROWS, context - 1)
    _settle_bounds(graph, probe, (*_MOMENTS, Moment(rows, context - rows)))
    for node in graph.nodes_of("Gemm"):
        _keep_batch(graph, probe, node)
    for node in graph.nodes_of("Reshape"):
        if probe.extents(node.input(0)) == probe.extents(node.output(0)) and probe.extents(node.input(0)) is not None:
            graph.replace_uses(node.output(0), node.input(0))
    graph.sweep()


def _shape(extents: Sequence[Extent]) -> list[int] | None:
    opened = [extent for extent in extents if not isinstance(extent, int)]
    return [extent if isinstance(extent, int) else -1 for extent in extents] if len(opened) <= 1 else None


def _settle_bounds(graph: EditableGraph, probe: Probe, moments: Sequence[Moment]) -> None:
    names = sorted(
        {
            name
            for node in graph.nodes
            if node.op in _ARRANGING
            for name in node.inputs[1:]
            if name and name not in graph.tensors and name not in probe.tokens_of and name not in graph.inputs
        }
    )
    try:
        first, *others = (probe.run(names, moment) for moment in moments)
    except ExportError:
        return
    settled: dict[str, Array] = {
        name: first[name] for name in names if all(np.array_equal(first[name], other[name]) for other in others)
    }
    for name, value in settled.items():
        graph.replace_uses(name, graph.add_tensor("bound.settled", value))


def _keep_batch(graph: EditableGraph, probe: Probe, gemm: Node) -> None:
    """Let a Gemm between two reshapes, [1, M, K] or [1, M, heads, K / heads] to [M, K] and [M, N] to [1, M, N], be a
    MatMul that keeps the batch."""
    flattened = graph.producer_of(gemm.input(0), "Reshape")
    matrix = graph.tensors.get(gemm.input(1))
    parted = [node for node in graph.consumers(gemm.output(0)) if node.op != "Shape"]
    if flattened is None or matrix is None or not _is_product(gemm) or gemm.output(0) in graph.outputs:
        return
    given, columns = probe.extents(flattened.input(0)), probe.extents(gemm.output(0))
    wanted = (1, "rows", *(columns or ())[1:])
    if given is None or given[:2] != (1, "rows") or probe.extents(gemm.input(0)) != ("rows", matrix.shape[0]):
        return
    if not parted or not all(node.op == "Reshape" and probe.extents(node.output(0)) == wanted for node in parted):
        return
    value = flattened.input(0)
    if len(given) > 3:
        joined = graph.add_tensor("heads.joined", np.array([1, -1, matrix.shape[0]], np.int64))
        value = graph.add("Reshape", [value, joined], name=f"{value}.joined").output(0)
    value = graph.add("MatMul", [value, gemm.input(1)], name=gemm.name or gemm.output(0)).output(0)
    if gemm.input(2):
        value = graph.add("Add", [value, gemm.input(2)], name=f"{value}.biased").output(0)
    for node in parted:
        graph.hand_over(node.output(0), value)


def _is_product(gemm: Node) -> bool:
    plain = gemm.attribute("alpha", 1.0) == 1 and gemm.attribute("beta", 1.0) == 1
    return plain and not gemm.attribute("transA", 0) and not gemm.attribute("transB", 0)
