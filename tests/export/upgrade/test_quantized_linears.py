"""Rewritten quantized linears compute what they computed before; those of dynamic quantization become MatMulNBits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import NodeProto, TensorProto, helper

from edgerun.export.graph.initializers import WeightFile
from edgerun.export.quantization.codes import nearest_rows
from edgerun.export.upgrade.editable import MICROSOFT, EditableGraph
from edgerun.export.upgrade.graph_parts import in_place, to_file
from edgerun.export.upgrade.quantized_linears import (
    absorb_biases,
    convert_integer_linears,
    join_linears,
    round_activations,
    share_reshaped_constants,
)
from edgerun.models.manifest import WeightFormat
from support.small_graphs import Array, Nodes, evaluate, model_of

Floats = npt.NDArray[np.float32]
K, BLOCK = 64, 32
VALUE = np.random.default_rng(0).standard_normal((1, 3, K)).astype(np.float32)


def linear(name: str, width: int, zero_points: bool = False, accuracy: int = 1) -> tuple[NodeProto, dict[str, Array]]:
    """A MatMulNBits over `x`, and its constants."""
    random = np.random.default_rng(width)
    codes, scales, *_ = nearest_rows(random.standard_normal((width, K)).astype(np.float32), WeightFormat(4, BLOCK))
    constants: dict[str, Array] = {f"{name}.codes": codes, f"{name}.scales": scales}
    if zero_points:
        constants[f"{name}.zeros"] = random.integers(0, 256, (width, K // BLOCK // 2), np.uint8)
    node = helper.make_node(
        "MatMulNBits", ["x", *constants], [name], domain=MICROSOFT, K=K, N=width, bits=4, block_size=BLOCK
    )
    if accuracy:
        node.attribute.append(helper.make_attribute("accuracy_level", accuracy))
    return node, constants


@pytest.mark.parametrize("zero_points", [False, True])
def test_joined_linears_compute_the_same(zero_points: bool, tmp_path: Path) -> None:
    widths = {"gate": 48, "up": 32, "other": 16}
    linears = {name: linear(name, width, zero_points) for name, width in widths.items()}
    bias = np.random.default_rng(5).standard_normal(32).astype(np.float32)
    nodes = [node for node, _ in linears.values()]
    nodes += [helper.make_node("Add", ["up", "bias"], ["biased"])]
    nodes += [helper.make_node("Neg", [name], [f"{name}.out"]) for name in ("gate", "biased", "other")]
    constants = {name: value for _, each in linears.values() for name, value in each.items()} | {"bias": bias}
    model = model_of(nodes, constants, {"x": VALUE}, ["gate.out", "biased.out", "other.out"])
    before = evaluate(model, {"x": VALUE})
    graph = EditableGraph(model, tmp_path)
    absorb_biases(graph)
    assert not graph.nodes_of("Add")
    join_linears(graph)
    (joined,) = graph.nodes_of("MatMulNBits")
    assert joined.attribute("N") == 96
    for expected, found in zip(before, evaluate(graph.model(in_place), {"x": VALUE}), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_linears_of_different_formats_are_not_joined_and_all_round_activations(tmp_path: Path) -> None:
    linears = [linear("a", 16, accuracy=0), linear("b", 16, zero_points=True), linear("c", 16)]
    nodes = [node for node, _ in linears] + [helper.make_node("Neg", [name], [f"{name}.out"]) for name in "abc"]
    constants = {name: value for _, each in linears for name, value in each.items()}
    graph = EditableGraph(model_of(nodes, constants, {"x": VALUE}, ["a.out", "b.out", "c.out"]), tmp_path)
    assert round_activations(graph) == 1
    join_linears(graph)
    assert [node.attribute("accuracy_level") for node in graph.nodes_of("MatMulNBits")] == [4, 1, 1]


def test_reshaped_constant_is_written_once(tmp_path: Path) -> None:
    table = (np.arange(1200) % 100).astype(np.float32).reshape(30, 40)  # sums of products are exact in float32
    nodes = [
        helper.make_node("Reshape", ["table", "shape"], ["wide"]),
        helper.make_node("Gather", ["wide", "ids"], ["rows"]),
        helper.make_node("MatMul", ["rows", "table"], ["out"]),
    ]
    ids = np.array([1, 3])
    model = model_of(nodes, {"table": table, "shape": np.array([40, 0 - 1])}, {"ids": ids}, ["out"])
    graph = EditableGraph(model, tmp_path)
    share_reshaped_constants(graph)
    assert not graph.nodes_of("Reshape")
    with WeightFile(tmp_path / "data") as data:
        written = graph.model(to_file(data, lambda _: None))
        assert data.digest().bytes == table.nbytes
    places = {tuple((entry.key, entry.value) for entry in each.external_data) for each in written.graph.initializer}
    assert len(places) == 1
    found = evaluate(graph.model(in_place), {"ids": ids})[0]
    np.testing.assert_array_equal(found, table.reshape(40, 30)[ids] @ table)


def integer_linear(codes: Array, scales: Floats, zeros: Array | None) -> onnx.ModelProto:
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
    graph = EditableGraph(integer_linear(codes, scales, counted), Path())
    convert_integer_linears(graph)
    (node,) = graph.nodes
    assert (node.op, node.attribute("bits"), node.attribute("accuracy_level")) == ("MatMulNBits", 8, 4)
    graph.set_attribute(node, "accuracy_level", 1)
    x = random.standard_normal((1, 3, columns)).astype(np.float32)
    weights = (codes.astype(np.float32) - (0 if counted is None else counted.astype(np.float32))) * scales
    (found,) = evaluate(graph.model(in_place), {"x": x})
    np.testing.assert_allclose(found, x @ weights, rtol=1e-3, atol=1e-3 * np.abs(weights).max())


@pytest.mark.parametrize("change", ["another scale", "another zero point", "codes that are computed"])
def test_similar_graphs_are_not_converted(change: str) -> None:
    model = integer_linear(np.ones((8, 4), np.int8), np.float32(0.5), np.array(0, np.int8))
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
