"""Models of a few given nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
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
