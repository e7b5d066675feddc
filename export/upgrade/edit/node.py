"""Nodes of an edited graph, and the constants among them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from onnx import GraphProto, NodeProto, helper

from ....errors import BundleError
from .tensors import Tensor, read_tensor

_CONSTANT_TYPES: Final = {
    "value_int": "int64",
    "value_ints": "int64",
    "value_float": "float32",
    "value_floats": "float32",
}


class Node:
    """One operator call. Its fields may be read; its inputs are changed through the graph."""

    __slots__ = ("attributes", "captured", "domain", "inputs", "name", "op", "outputs")

    def __init__(self, proto: NodeProto) -> None:
        self.op = proto.op_type
        self.domain = "" if proto.domain == "ai.onnx" else proto.domain
        self.name = proto.name
        self.inputs: tuple[str, ...] = tuple(proto.input)
        self.outputs: tuple[str, ...] = tuple(proto.output)
        self.attributes = {attribute.name: attribute for attribute in proto.attribute}
        self.captured: tuple[str, ...] = tuple(sorted(_captured(proto)))

    def __repr__(self) -> str:
        return f"{self.op}({', '.join(self.inputs)}) -> {', '.join(self.outputs)}"

    def input(self, index: int) -> str:
        """Name of an input; "" if it is absent."""
        return self.inputs[index] if index < len(self.inputs) else ""

    def output(self, index: int) -> str:
        """Name of an output; "" if it is absent."""
        return self.outputs[index] if index < len(self.outputs) else ""

    def attribute(self, name: str, default: Any = None) -> Any:
        """Value of an attribute: int, float, str, list, TensorProto or GraphProto."""
        proto = self.attributes.get(name)
        if proto is None:
            return default
        value = helper.get_attribute_value(proto)
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

    def proto(self) -> NodeProto:
        """Return the node as an ONNX message."""
        return NodeProto(
            op_type=self.op,
            domain=self.domain,
            name=self.name,
            input=self.inputs,
            output=self.outputs,
            attribute=self.attributes.values(),
        )

    def reads(self) -> Iterator[str]:
        """Names of the values that the node and its branches read."""
        yield from (name for name in self.inputs if name)
        yield from self.captured


def constant_of(proto: NodeProto, folder: Path) -> Tensor:
    """The value of a Constant node.

    Raises:
        BundleError: it is of a type that cannot be read.
    """
    for attribute in proto.attribute:
        if attribute.name == "value":
            return read_tensor(attribute.t, folder)
        if attribute.name in _CONSTANT_TYPES:
            return Tensor.of(np.array(helper.get_attribute_value(attribute), _CONSTANT_TYPES[attribute.name]))
    raise BundleError(
        f"the model's constant {proto.output[0]} has an unsupported type", "such a model cannot be upgraded"
    )


def _captured(proto: NodeProto) -> set[str]:
    """Names that the branches of a node read from the enclosing graph."""
    found: set[str] = set()
    for attribute in proto.attribute:
        for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            found |= _outer_names(graph)
    return found


def _outer_names(graph: GraphProto) -> set[str]:
    made = {each.name for each in graph.input} | {each.name for each in graph.initializer}
    made.update(name for node in graph.node for name in node.output)
    read = {name for node in graph.node for name in (*node.input, *_captured(node)) if name}
    return (read | {each.name for each in graph.output}) - made
