"""Casts of a value to the type it has already: exporters leave many, between nodes that belong together."""

from __future__ import annotations

from typing import Final

from onnx import TensorProto

from .editable import EditableGraph, Node

_TYPE_OF_FIRST: Final = frozenset(
    (
        *("Add", "Div", "Erf", "Expand", "Gather", "Gelu", "Gemm", "GroupQueryAttention", "LayerNormalization"),
        *("MatMul", "MatMulNBits", "Mul", "Neg", "Pow", "QuickGelu", "Reciprocal", "ReduceMean", "Reshape"),
        *("RotaryEmbedding", "Sigmoid", "SimplifiedLayerNormalization", "Slice", "Softmax", "Split", "Sqrt"),
        *("Squeeze", "Sub", "Tanh", "Transpose", "Unsqueeze"),
    )
)
"""Operators whose (first) output has the type of the first input."""


def drop_idle_casts(graph: EditableGraph) -> None:
    """Remove casts that change nothing."""
    types: dict[str, int] = {}
    for node in graph.in_order():
        kind = _type_made(graph, node, types)
        before = _type_of(graph, node.input(0), types)
        if node.op == "Cast" and kind == before and kind and node.output(0) not in graph.outputs:
            graph.replace_uses(node.output(0), node.input(0))
            graph.remove(node)
            continue
        for name in node.outputs:
            types[name] = kind


def _type_made(graph: EditableGraph, node: Node, types: dict[str, int]) -> int:
    if node.op == "Cast":
        return int(node.attribute("to"))
    if node.op == "Shape":
        return int(TensorProto.INT64)
    return _type_of(graph, node.input(0), types) if node.op in _TYPE_OF_FIRST else 0


def _type_of(graph: EditableGraph, name: str, types: dict[str, int]) -> int:
    """As in `TensorProto.DataType`; 0 where it is not known."""
    return types.get(name, 0) or graph.element_type(name)
