"""Half precision to float32, in which a CPU computes: it would convert every weight and every value at each step."""

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
_AT_ONCE: Final = 1 << 22
"""Elements converted in one piece."""
_LOOKED_UP_FROM: Final = 1 << 20
"""Elements from which a table of rows stays as it is, and the rows looked up are widened."""


def is_half(graph: EditableGraph) -> bool:
    """Whether the graph's caches or weights are in half precision."""
    return any(tensor.element_type in _HALVES for tensor in graph.tensors.values()) or any(
        graph.element_type(name) in _HALVES for name in graph.inputs
    )


def widen(graph: EditableGraph) -> None:
    """Make every half-precision value of the graph float32, inputs and outputs included.

    Raises:
        BundleError: a branch of the graph holds such values.
    """
    for node in graph.nodes:
        _retype(graph, node)
    made: dict[Source, Source] = {}  # a tied matrix stays one matrix
    for name, tensor in list(graph.tensors.items()):
        if tensor.element_type not in _HALVES:
            continue
        if tensor.size >= _LOOKED_UP_FROM and all(node.op == "Gather" for node in graph.consumers(name)):
            _widen_rows(graph, name)
        else:
            wide = widened(tensor)
            graph.tensors[name] = replace(wide, source=made.setdefault(tensor.source, wide.source))
    for info in (*graph.inputs.values(), *graph.outputs.values()):
        if info.type.tensor_type.elem_type in _HALVES:
            info.type.tensor_type.elem_type = TensorProto.FLOAT
    graph.forget_types()


def _retype(graph: EditableGraph, node: Node) -> None:
    """Let a node that names a type name float32."""
    if any(name in node.attributes for name in ("then_branch", "body")):
        raise BundleError("the model computes in half precision within branches", "run it as it is")
    if node.op == "Cast" and node.attribute("to") in _HALVES:
        graph.set_attribute(node, "to", TensorProto.FLOAT)
    value = node.attribute("value") if node.op == "ConstantOfShape" else None
    if value is not None and value.data_type in _HALVES:
        wide = numpy_helper.to_array(value).astype(np.float32)
        graph.set_attribute(node, "value", numpy_helper.from_array(wide))


def _widen_rows(graph: EditableGraph, name: str) -> None:
    """Leave a table as it is and widen the rows that are looked up in it."""
    for node in graph.consumers(name):
        found, readers = node.output(0), graph.consumers(node.output(0))
        wide = graph.add("Cast", [found], name=f"{found}.float", to=TensorProto.FLOAT).output(0)
        for reader in readers:
            graph.set_inputs(reader, [wide if each == found else each for each in reader.inputs])


def widened(tensor: Tensor) -> Tensor:
    """The tensor in float32, converted while it is written."""

    def pieces() -> Iterator[Array]:
        flat = tensor.array().reshape(-1)
        for start in range(0, flat.size, _AT_ONCE):
            yield flat[start : start + _AT_ONCE].astype(np.float32)

    return Tensor(TensorProto.FLOAT, tensor.shape, Computed(4 * tensor.size, pieces, widens=tensor))
