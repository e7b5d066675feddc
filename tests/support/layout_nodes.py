"""Builds the nodes of an ONNX graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

Array = npt.NDArray[Any]


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
