"""Recognition of masks and sliding windows in attention biases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from edgerun.errors import BundleError
from edgerun.export.upgrade.contract_inputs import window_of_bias
from edgerun.export.upgrade.editable import EditableGraph
from edgerun.export.upgrade.subgraph_runner import SubgraphRunner
from support.small_graphs import Array, model_of


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("slope", [0.0, 0.5])
def test_window_of_a_bias_is_found(window: int, slope: float, tmp_path: Path) -> None:
    """The bias is computed over slots from the length of the mask: causal, or with a window; a slope is refused."""
    nodes = [
        helper.make_node("Shape", ["attention_mask"], ["whole"]),
        helper.make_node("Gather", ["whole", "last"], ["total"]),
        helper.make_node("Shape", ["input_ids"], ["new"]),
        helper.make_node("Gather", ["new", "last"], ["count"]),
        helper.make_node("Sub", ["total", "count"], ["past"]),
        helper.make_node("Range", ["zero", "total", "one"], ["slots"]),
        helper.make_node("Range", ["past", "total", "one"], ["queries"]),
        helper.make_node("Unsqueeze", ["queries", "last"], ["columns"]),
        helper.make_node("Sub", ["columns", "slots"], ["distance"]),
        helper.make_node("Less", ["distance", "limit"], ["near"]),
        helper.make_node("GreaterOrEqual", ["distance", "zero"], ["before"]),
        helper.make_node("And", ["near", "before"], ["seen"]),
        helper.make_node("Cast", ["distance"], ["far"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["far", "slope"], ["sloped"]),
        helper.make_node("Where", ["seen", "sloped", "masked"], ["flat"]),
        helper.make_node("Unsqueeze", ["flat", "front"], ["bias"]),
    ]
    constants: dict[str, Array] = {
        **{
            name: np.array(value)
            for name, value in {"last": 1, "zero": 0, "one": 1, "limit": window or 1 << 40}.items()
        },
        "slope": np.array(slope, np.float32),
        "masked": np.array(-3e38, np.float32),
        "front": np.array([0, 1]),
    }
    inputs: dict[str, Array] = {"input_ids": np.zeros((1, 1), np.int64), "attention_mask": np.zeros((1, 1), np.int64)}
    model = model_of(nodes, constants, inputs, ["bias"])
    for info, dimension in zip(model.graph.input, ("new", "total"), strict=True):
        info.type.tensor_type.shape.dim[1].dim_param = dimension
    runner = SubgraphRunner(EditableGraph(model, tmp_path))
    if slope:
        with pytest.raises(BundleError, match="neither a mask nor a window"):
            window_of_bias(runner, "bias", 100)
    else:
        assert window_of_bias(runner, "bias", 100) == window
        assert window_of_bias(runner, "bias", 30) == 0  # a sequence this short is inside the window
