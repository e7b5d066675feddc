"""Models of a few nodes, given as they are or built one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from edgerun.export.check.contract_session import evaluate_passes

Array = npt.NDArray[Any]


def model_of(
    nodes: Sequence[NodeProto],
    constants: Mapping[str, Array],
    inputs: Mapping[str, Array],
    outputs: Sequence[str],
) -> ModelProto:
    """A model of these nodes; `inputs` gives the types and shapes, and outputs are float32."""
    graph = GraphProto(
        name="g",
        node=nodes,
        initializer=[numpy_helper.from_array(value, name) for name, value in constants.items()],
        input=[
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            for name, value in inputs.items()
        ],
        output=[helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def add_chain(length: int) -> tuple[list[NodeProto], dict[str, Array]]:
    """Additions of 1 from value v0 to value v`length`, and their constant."""
    nodes = [helper.make_node("Add", [f"v{index}", "one"], [f"v{index + 1}"]) for index in range(length)]
    return nodes, {"one": np.ones(1, np.float32)}


def evaluate(model: ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    """All outputs of a model, without graph optimizations."""
    return evaluate_passes(model, [feeds], Path())[0]


@dataclass
class Nodes:
    """Nodes in order, and the constants that they use."""

    opset: int
    prefix: str = ""
    constants: dict[str, Array] = field(default_factory=dict)
    nodes: list[onnx.NodeProto] = field(default_factory=list)

    def inner(self, prefix: str) -> Nodes:
        """An empty list of nodes for a branch, sharing the constants."""
        return Nodes(self.opset, prefix, self.constants)

    def op(self, kind: str, *inputs: str, outputs: Sequence[str] = (), domain: str = "", **attributes: Any) -> str:
        """Add a node; returns its first output."""
        names = list(outputs) or [f"{self.prefix}{kind}_{len(self.nodes)}"]
        self.nodes.append(helper.make_node(kind, list(inputs), names, names[0], domain=domain, **attributes))
        return names[0]

    def constant(self, value: Any, dtype: npt.DTypeLike = np.int64, name: str = "") -> str:
        """Add an initializer; equal ones share a name unless one is given."""
        array = np.asarray(value, dtype)
        name = name or f"constant_{array.dtype}_{array.shape}_{array.tolist()}".replace(" ", "")
        self.constants[name] = array
        return name

    def linear(self, value: str, name: str, weight: Array) -> str:
        """value @ weight.T, with the weight stored transposed, as tracing exporters do."""
        return self.op("MatMul", value, self.constant(weight.T, np.float32, f"{name}.transposed"))

    def norm(self, value: str, name: str, weight: Array, *, fused: bool) -> str:
        """RMS norm over the last axis."""
        scale = self.constant(weight, np.float32, name)
        if fused:
            return self.op("SimplifiedLayerNormalization", value, scale, axis=-1, epsilon=1e-5, stash_type=1)
        square = self.op("Pow", value, self.constant(2, np.float32))
        if self.opset >= 18:
            mean = self.op("ReduceMean", square, self.constant([-1]), keepdims=1)
        else:
            mean = self.op("ReduceMean", square, axes=[-1], keepdims=1)
        root = self.op("Sqrt", self.op("Add", mean, self.constant(1e-5, np.float32)))
        inverse = self.op("Div", self.constant(1, np.float32), root)
        return self.op("Mul", scale, self.op("Mul", value, inverse))

    def model(
        self, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto], ir_version: int = 9
    ) -> onnx.ModelProto:
        """The model of these nodes."""
        constants = [onnx.numpy_helper.from_array(array, name) for name, array in self.constants.items()]
        graph = helper.make_graph(self.nodes, "decoder", list(inputs), list(outputs), constants)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=ir_version, producer_name="layouts")

    def extent(self, value: str, axis: int) -> str:
        """The size of a dimension, int64 [1]."""
        return self.op("Gather", self.op("Shape", value), self.constant([axis]), axis=0)

    def span(self, start: str, end: str) -> str:
        """start .. end-1 as int64 [n]; both are int64 [1]."""
        scalar = self.constant([], np.int64, "no_dimensions")
        first, last = self.op("Reshape", start, scalar), self.op("Reshape", end, scalar)
        return self.op("Range", first, last, self.constant(1))
