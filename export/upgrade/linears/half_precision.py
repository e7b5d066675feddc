"""Converts half precision to float32, in which a CPU computes.

A CPU would otherwise convert every weight and every value in each pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
from onnx import TensorProto, numpy_helper

from ....errors import BundleError
from ..edit.editable import EditableGraph, Node
from ..edit.tensors import Array, Computed, Source, Tensor

_HALVES: Final = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_CHUNK: Final = 1 << 22
"""Number of elements that are converted at once."""
_LARGE_TABLE: Final = 1 << 20
"""Number of elements from which a table stays in half precision, and the gathered rows are converted."""


def is_half(graph: EditableGraph) -> bool:
    """Whether the graph's caches or weights are in half precision."""
    return any(tensor.element_type in _HALVES for tensor in graph.tensors.values()) or any(
        graph.element_type(name) in _HALVES for name in graph.inputs
    )


def widen(graph: EditableGraph) -> None:
    """Convert every half-precision value of the graph to float32, inputs and outputs included.

    Raises:
        BundleError: a branch of the graph may compute in half precision.
    """
    for node in graph.nodes:
        _retype(graph, node)
    converted: dict[Source, Source] = {}  # a tied matrix remains one matrix
    for name, tensor in list(graph.tensors.items()):
        if tensor.element_type not in _HALVES:
            continue
        if tensor.size >= _LARGE_TABLE and all(node.op == "Gather" for node in graph.consumers(name)):
            _widen_gathered(graph, name)
        else:
            wide = _widened(tensor)
            graph.tensors[name] = replace(wide, source=converted.setdefault(tensor.source, wide.source))
    for info in (*graph.inputs.values(), *graph.outputs.values()):
        if info.type.tensor_type.elem_type in _HALVES:
            info.type.tensor_type.elem_type = TensorProto.FLOAT


def _retype(graph: EditableGraph, node: Node) -> None:
    """Replace a half-precision type in the attributes of a node by float32."""
    if any(name in node.attributes for name in ("then_branch", "body")):
        raise BundleError("the model has half precision and branches", "run it as it is")
    if node.op == "Cast" and node.attribute("to") in _HALVES:
        graph.set_attribute(node, "to", TensorProto.FLOAT)
    value = node.attribute("value") if node.op == "ConstantOfShape" else None
    if value is not None and value.data_type in _HALVES:
        wide = numpy_helper.to_array(value).astype(np.float32)
        graph.set_attribute(node, "value", numpy_helper.from_array(wide))


def _widen_gathered(graph: EditableGraph, name: str) -> None:
    """Convert the rows that are gathered from a table instead of the table."""
    for node in graph.consumers(name):
        rows, readers = node.output(0), graph.consumers(node.output(0))
        wide = graph.value("Cast", [rows], name=f"{rows}.float", to=TensorProto.FLOAT)
        for reader in readers:
            graph.set_inputs(reader, [wide if each == rows else each for each in reader.inputs])


def _widened(tensor: Tensor) -> Tensor:
    """Declare the tensor in float32; it is converted when it is written."""

    def pieces() -> Iterator[Array]:
        flat = tensor.array().reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            yield flat[start : start + _CHUNK].astype(np.float32)

    return Tensor(TensorProto.FLOAT, tensor.shape, Computed(4 * tensor.size, pieces, widens=tensor))
