"""Fuses RMS norms in plain operators, with the residual addition before them.

    y = x / sqrt(mean(x ** 2) + epsilon) * weight

The search starts at the mean square and follows the graph to the root, its reciprocal, and the products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ..edit.editable import MICROSOFT, EditableGraph, Node

_FUSED: Final = "SimplifiedLayerNormalization"
_MAX_EPSILON: Final = 1e-2


@dataclass(frozen=True)
class _Norm:
    value: str
    """x"""
    normed: str
    """y"""
    weight: str
    """Name of a constant vector, or "" for ones."""
    epsilon: float


def fuse_norms(graph: EditableGraph) -> None:
    """Replace RMS norms by SimplifiedLayerNormalization, including the standard's own operator (opset 23)."""
    for node in graph.nodes_of("RMSNormalization"):
        if node.attribute("axis", -1) == -1:
            epsilon = node.attribute("epsilon", 1e-5)
            fused = graph.add(_FUSED, node.inputs, name=node.name, axis=-1, epsilon=epsilon, stash_type=1)
            graph.replace_value(node.output(0), fused.output(0))
    norms = [norm for node in graph.nodes_of("ReduceMean") if (norm := _norm(graph, node)) is not None]
    for norm in norms:
        width = _width(graph, norm)
        weight = norm.weight or (graph.add_tensor("norm.ones", np.ones(width, np.float32)) if width else "")
        if weight:
            node = graph.add(
                _FUSED,
                [norm.value, weight],
                name=f"{norm.normed}.norm",
                axis=-1,
                epsilon=norm.epsilon,
                stash_type=1,
            )
            graph.replace_value(norm.normed, node.output(0))
    graph.sweep()


def fuse_residuals(graph: EditableGraph) -> None:
    """Replace norms of a sum of two values by SkipSimplifiedLayerNormalization, which adds them itself."""
    for norm in graph.nodes_of(_FUSED):
        add = graph.producer_of(norm.input(0), "Add")
        if add is None or any(name in graph.tensors for name in add.inputs) or add.output(0) in graph.outputs:
            continue
        fused = graph.add(
            "SkipSimplifiedLayerNormalization",
            [*add.inputs, norm.input(1)],
            [f"{norm.output(0)}.added", "", "", f"{add.output(0)}.sum"],
            domain=MICROSOFT,
            epsilon=norm.attribute("epsilon"),
        )
        graph.replace_value(norm.output(0), fused.output(0))
        graph.replace_uses(add.output(0), fused.output(3), exclude=[fused])
    graph.sweep()


def _norm(graph: EditableGraph, mean: Node) -> _Norm | None:
    """The norm around a mean, if that is a mean of squares along the last axis."""
    axes = graph.integers(mean.input(1)) if mean.input(1) else mean.attribute("axes")
    square = graph.producer_of(mean.input(0), "Pow", "Mul")
    if axes != [-1] or not mean.attribute("keepdims", 1) or square is None:
        return None
    value = square.input(0)
    if square.input(1) != value and not (square.op == "Pow" and graph.scalar(square.input(1)) == 2):
        return None
    shifted = _reader(graph, mean.output(0), "Add")
    epsilon = None if shifted is None else _other_number(graph, shifted, mean.output(0))
    root = None if shifted is None else _reader(graph, shifted.output(0), "Sqrt")
    if epsilon is None or not 0 <= epsilon < _MAX_EPSILON or root is None:
        return None
    scaled = _scaled(graph, value, root.output(0))
    return None if scaled is None else _weighted(graph, value, scaled, epsilon)


def _scaled(graph: EditableGraph, value: str, root: str) -> str | None:
    """x divided by the root, as a quotient or as a product with the reciprocal."""
    reader = _reader(graph, root, "Div", "Reciprocal")
    if reader is None:
        return None
    if reader.op == "Div" and reader.inputs == (value, root):
        return reader.output(0)
    if reader.op == "Div" and graph.scalar(reader.input(0)) != 1:
        return None
    product = _reader(graph, reader.output(0), "Mul")
    if product is None or set(product.inputs) != {value, reader.output(0)}:
        return None
    return product.output(0)


def _weighted(graph: EditableGraph, value: str, scaled: str, epsilon: float) -> _Norm:
    product = _reader(graph, scaled, "Mul")
    if product is not None:
        weight = next((name for name in product.inputs if name in graph.tensors), "")
        if weight and len(graph.tensors[weight].shape) == 1 and graph.tensors[weight].size > 1:
            return _Norm(value, product.output(0), weight, epsilon)
    return _Norm(value, scaled, "", epsilon)


def _width(graph: EditableGraph, norm: _Norm) -> int:
    """Size of the last axis; 0 if it is not declared."""
    width = (graph.shape(norm.value) or ("",))[-1]
    return width if isinstance(width, int) else 0


def _reader(graph: EditableGraph, name: str, *ops: str) -> Node | None:
    """The only reader of a value, if it is one of these operators."""
    readers = graph.consumers(name)
    return readers[0] if len(readers) == 1 and readers[0].op in ops and name not in graph.outputs else None


def _other_number(graph: EditableGraph, node: Node, name: str) -> float | None:
    others = [each for each in node.inputs if each != name]
    return graph.scalar(others[0]) if len(others) == 1 else None
