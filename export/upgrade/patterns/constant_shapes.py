"""Constant folding of shapes and bounds that are the same in every pass.

A graph that was exported for any batch size computes shapes and bounds at run time, several nodes for each reshape. For
one sequence every dimension except the number of tokens is known, and that one can be inferred.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from ....errors import ExportError
from ..decoder_io import PassShape
from ..edit.editable import EditableGraph, Node
from ..edit.tensors import Array
from ..subgraph_runner import Dimension, SubgraphRunner

_PASSES: Final = (PassShape(5, 9), PassShape(3, 17))
_MANY_TOKENS: Final = 1 << 10
_ARRANGING: Final = frozenset({"Expand", "Pad", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Unsqueeze"})
"""Operators that rearrange their first input as the others say."""


def fold_shapes(graph: EditableGraph, context: int) -> None:
    """Make shapes and bounds constants, and remove reshapes that do nothing.

    A value that is the same in short passes may differ in a long one (the start of a window), so a pass that fills
    `context` is also compared.
    """
    runner = SubgraphRunner(graph)
    for node in graph.nodes_of("Reshape"):
        dimensions = runner.shape(node.output(0))
        if node.input(1) not in graph.tensors and dimensions is not None:
            shape = _reshape_target(dimensions)
            if shape is not None:
                graph.set_input(node, 1, graph.add_tensor("shape.settled", np.array(shape, np.int64)))
    tokens = min(_MANY_TOKENS, context - 1)
    _fold_bounds(graph, runner, (*_PASSES, PassShape(tokens, context - tokens)))
    for node in graph.nodes_of("Gemm"):
        _keep_batch_axis(graph, runner, node)
    for node in graph.nodes_of("Reshape"):
        if runner.shape(node.input(0)) == runner.shape(node.output(0)) and runner.shape(node.input(0)) is not None:
            graph.replace_uses(node.output(0), node.input(0))
    graph.sweep()


def _reshape_target(dimensions: Sequence[Dimension]) -> list[int] | None:
    """The shape with -1 for the dimension that is not a number; None if there are several."""
    variable = [each for each in dimensions if not isinstance(each, int)]
    return [each if isinstance(each, int) else -1 for each in dimensions] if len(variable) <= 1 else None


def _fold_bounds(graph: EditableGraph, runner: SubgraphRunner, passes: Sequence[PassShape]) -> None:
    names = sorted(
        {
            name
            for node in graph.nodes
            if node.op in _ARRANGING
            for name in node.inputs[1:]
            if name and name not in graph.tensors and name not in runner.token_dependent and name not in graph.inputs
        }
    )
    try:
        first, *others = (runner.run(names, lengths) for lengths in passes)
    except ExportError:
        return
    constant: dict[str, Array] = {
        name: first[name] for name in names if all(np.array_equal(first[name], other[name]) for other in others)
    }
    for name, value in constant.items():
        graph.replace_uses(name, graph.add_tensor("bound.settled", value))


def _keep_batch_axis(graph: EditableGraph, runner: SubgraphRunner, gemm: Node) -> None:
    """Replace a Gemm between two reshapes by a MatMul that keeps the batch axis.

    The reshapes are [1, M, K] or [1, M, heads, K / heads] to [M, K], and [M, N] to [1, M, N].
    """
    flattened = graph.producer_of(gemm.input(0), "Reshape")
    matrix = graph.tensors.get(gemm.input(1))
    reshaped = [node for node in graph.consumers(gemm.output(0)) if node.op != "Shape"]
    if flattened is None or matrix is None or not _is_product(gemm) or gemm.output(0) in graph.outputs:
        return
    source, product = runner.shape(flattened.input(0)), runner.shape(gemm.output(0))
    wanted = (1, "new", *(product or ())[1:])
    if source is None or source[:2] != (1, "new") or runner.shape(gemm.input(0)) != ("new", matrix.shape[0]):
        return
    if not reshaped or not all(node.op == "Reshape" and runner.shape(node.output(0)) == wanted for node in reshaped):
        return
    value = flattened.input(0)
    if len(source) > 3:
        merged = graph.add_tensor("heads.joined", np.array([1, -1, matrix.shape[0]], np.int64))
        value = graph.add("Reshape", [value, merged], name=f"{value}.joined").output(0)
    value = graph.add("MatMul", [value, gemm.input(1)], name=gemm.name or gemm.output(0)).output(0)
    if gemm.input(2):
        value = graph.add("Add", [value, gemm.input(2)], name=f"{value}.biased").output(0)
    for node in reshaped:
        graph.replace_value(node.output(0), value)


def _is_product(gemm: Node) -> bool:
    """Whether a Gemm is a plain product plus a bias."""
    unscaled = gemm.attribute("alpha", 1.0) == 1 and gemm.attribute("beta", 1.0) == 1
    return unscaled and not gemm.attribute("transA", 0) and not gemm.attribute("transB", 0)
