"""Replaces plain operators, as PyTorch's exporter writes them, by fused ones."""

from __future__ import annotations

from typing import Final

from onnx import TensorProto

from ..edit.editable import EditableGraph, Node
from .attention_fusion import fuse_attention, pack_heads
from .constant_shapes import fold_shapes

_KEEPING_TYPE: Final = frozenset(
    (
        *("Add", "Div", "Erf", "Expand", "Gather", "Gelu", "Gemm", "GroupQueryAttention", "LayerNormalization"),
        *("MatMul", "MatMulNBits", "Mul", "Neg", "Pow", "QuickGelu", "Reciprocal", "ReduceMean", "Reshape"),
        *("RotaryEmbedding", "Sigmoid", "SimplifiedLayerNormalization", "Slice", "Softmax", "Split", "Sqrt"),
        *("Squeeze", "Sub", "Tanh", "Transpose", "Unsqueeze"),
    )
)
"""Operators whose first output has the type of the first input."""


def fuse_operators(graph: EditableGraph, context: int) -> None:
    """Fuse attention with its rotary embedding, norms and activations, and make shapes constants.

    Args:
        graph: a decoder that computes in float32 and whose attention is not fused.
        context: number of positions that the upgraded model will serve.

    Raises:
        BundleError: something in the place of attention is not recognized.
        ExportError: a part of the graph cannot be run.
    """
    fold_shapes(graph, context)
    fuse_attention(graph, context)
    pack_heads(graph)


def drop_redundant_casts(graph: EditableGraph) -> None:
    """Remove casts of a value to the type that it has, which exporters leave between nodes that belong together."""
    types: dict[str, int] = {}
    for node in graph.in_order():
        output_type = _output_type(graph, node, types)
        input_type = _type_of(graph, node.input(0), types)
        if node.op == "Cast" and output_type == input_type and output_type and node.output(0) not in graph.outputs:
            graph.replace_uses(node.output(0), node.input(0))
            graph.remove(node)
            continue
        for name in node.outputs:
            types[name] = output_type


def _output_type(graph: EditableGraph, node: Node, types: dict[str, int]) -> int:
    if node.op == "Cast":
        return int(node.attribute("to"))
    if node.op == "Shape":
        return int(TensorProto.INT64)
    return _type_of(graph, node.input(0), types) if node.op in _KEEPING_TYPE else 0


def _type_of(graph: EditableGraph, name: str, types: dict[str, int]) -> int:
    """A `TensorProto.DataType`; 0 if it is unknown."""
    return types.get(name, 0) or graph.element_type(name)
