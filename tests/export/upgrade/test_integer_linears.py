"""Conversion of dynamically quantized linears to MatMulNBits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from edgerun.export.check.contract_session import evaluate
from edgerun.export.upgrade.editable import EditableGraph
from edgerun.export.upgrade.graph_parts import in_place
from edgerun.export.upgrade.quantized_linears import convert_integer_linears
from support.layout_nodes import Nodes

Floats = npt.NDArray[np.float32]


def linear(codes: npt.NDArray[np.generic], scales: Floats, zeros: npt.NDArray[np.generic] | None) -> onnx.ModelProto:
    """x [1, M, K] times (codes - zeros) * scales, as `onnxruntime.quantization.quantize_dynamic` writes it."""
    nodes = Nodes(18)
    nodes.op("DynamicQuantizeLinear", "x", outputs=["x.codes", "x.scale", "x.zero"])
    read = ["x.codes", nodes.constant(codes, codes.dtype, "codes"), "x.zero"]
    if zeros is not None:
        read.append(nodes.constant(zeros, zeros.dtype, "zeros"))
    wide = nodes.op("Cast", nodes.op("MatMulInteger", *read), to=TensorProto.FLOAT)
    scale = nodes.op("Mul", "x.scale", nodes.constant(scales, np.float32, "scales"))
    nodes.op("Mul", wide, scale, outputs=["y"])
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "M", codes.shape[0]])
    return nodes.model([value], [onnx.ValueInfoProto(name="y")])


def result(graph: EditableGraph, x: Floats) -> Floats:
    out: Floats = evaluate(graph.model(in_place), {"x": x})[0]
    return out


@settings(max_examples=30)
@given(
    columns=st.sampled_from([20, 32, 96, 128, 256]),
    rows=st.integers(1, 40),
    signed=st.booleans(),
    by_column=st.booleans(),
    zeros=st.sampled_from(["none", "one", "each"]),
    seed=st.integers(0, 1000),
)
def test_weights_do_not_change(columns: int, rows: int, signed: bool, by_column: bool, zeros: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    kind = np.dtype(np.int8 if signed else np.uint8)
    bounds = np.iinfo(kind)
    codes = random.integers(bounds.min, bounds.max + 1, (columns, rows)).astype(kind)
    scales = random.uniform(0.001, 0.1, rows if by_column else ()).astype(np.float32)
    counted = None
    if zeros != "none":
        counted = random.integers(bounds.min, bounds.max + 1, rows if zeros == "each" else ()).astype(kind)
    graph = EditableGraph(linear(codes, scales, counted), Path())
    convert_integer_linears(graph)
    (node,) = graph.nodes
    assert (node.op, node.attribute("bits"), node.attribute("accuracy_level")) == ("MatMulNBits", 8, 4)
    graph.set_attribute(node, "accuracy_level", 1)
    x = random.standard_normal((1, 3, columns)).astype(np.float32)
    weights = (codes.astype(np.float32) - (0 if counted is None else counted.astype(np.float32))) * scales
    np.testing.assert_allclose(result(graph, x), x @ weights, rtol=1e-3, atol=1e-3 * np.abs(weights).max())


def test_results_differ_only_by_rounding_of_activations() -> None:
    """Codes have 7 bits, since MatMulInteger saturates with 8 bits on CPUs without VNNI."""
    random = np.random.default_rng(0)
    model = linear(random.integers(-64, 64, (96, 30)).astype(np.int8), np.float32(0.01), np.array(3, np.int8))
    x = random.standard_normal((1, 5, 96)).astype(np.float32)
    before, graph = EditableGraph(model, Path()), EditableGraph(model, Path())
    convert_integer_linears(graph)
    old, new = result(before, x), result(graph, x)
    assert np.corrcoef(old.ravel(), new.ravel())[0, 1] > 0.999


@pytest.mark.parametrize("change", ["another scale", "another zero point", "codes that are computed"])
def test_similar_graphs_are_not_converted(change: str) -> None:
    model = linear(np.ones((8, 4), np.int8), np.float32(0.5), np.array(0, np.int8))
    product = next(node for node in model.graph.node if node.op_type == "MatMulInteger")
    scale = next(node for node in model.graph.node if node.op_type == "Mul")
    if change == "another scale":
        scale.input[0] = "scales"
    elif change == "another zero point":
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0, np.uint8), "other"))
        product.input[2] = "other"
    else:
        model.graph.node.insert(0, helper.make_node("Abs", ["codes"], ["computed"]))
        product.input[1] = "computed"
    graph = EditableGraph(model, Path())
    convert_integer_linears(graph)
    assert not graph.nodes_of("MatMulNBits")
