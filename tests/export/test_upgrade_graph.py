"""The graph under edit and the passes over quantized linears, on graphs small enough to run before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from edgerun.errors import BundleError
from edgerun.export.check.contract_session import ModelSession, evaluate
from edgerun.export.graph.weight_file import WeightFile
from edgerun.export.quantization.codes import quantize_rows
from edgerun.export.upgrade.edit.editable import MICROSOFT, EditableGraph
from edgerun.export.upgrade.edit.tensors import Tensor, read_tensor
from edgerun.export.upgrade.edit.write import InPlace, ToFile
from edgerun.export.upgrade.linears.shared_weights import share_reshaped
from edgerun.export.upgrade.linears.sibling_linears import join_siblings, round_activations, take_in_biases
from edgerun.export.upgrade.linears.widen import widen
from edgerun.export.upgrade.patterns.masks import window_of_bias
from edgerun.models.manifest import WeightFormat

Array = npt.NDArray[Any]
K, BLOCK = 64, 32
VALUE = np.random.default_rng(0).standard_normal((1, 3, K)).astype(np.float32)


def model_of(
    nodes: list[NodeProto], constants: dict[str, Array], inputs: dict[str, Array], outputs: list[str]
) -> ModelProto:
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
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def linear(name: str, width: int, zero_points: bool = False, accuracy: int = 1) -> tuple[NodeProto, dict[str, Array]]:
    """A MatMulNBits over `x` and its constants."""
    random = np.random.default_rng(width)
    codes, scales = quantize_rows(random.standard_normal((width, K)).astype(np.float32), WeightFormat(4, BLOCK))
    constants: dict[str, Array] = {f"{name}.codes": codes, f"{name}.scales": scales}
    if zero_points:
        constants[f"{name}.zeros"] = random.integers(0, 256, (width, K // BLOCK // 2), np.uint8)
    node = helper.make_node(
        "MatMulNBits", ["x", *constants], [name], domain=MICROSOFT, K=K, N=width, bits=4, block_size=BLOCK
    )
    if accuracy:
        node.attribute.append(helper.make_attribute("accuracy_level", accuracy))
    return node, constants


def run(graph: EditableGraph, feeds: dict[str, Array]) -> list[Array]:
    return evaluate(graph.model(InPlace()), feeds)


@pytest.mark.parametrize("zero_points", [False, True])
def test_joined_linears_give_what_they_gave_apart(zero_points: bool, tmp_path: Path) -> None:
    widths = {"gate": 48, "up": 32, "other": 16}
    made = {name: linear(name, width, zero_points) for name, width in widths.items()}
    bias = np.random.default_rng(5).standard_normal(32).astype(np.float32)
    nodes = [node for node, _ in made.values()]
    nodes += [helper.make_node("Add", ["up", "bias"], ["biased"])]
    nodes += [helper.make_node("Neg", [name], [f"{name}.out"]) for name in ("gate", "biased", "other")]
    constants = {name: value for _, each in made.values() for name, value in each.items()} | {"bias": bias}
    model = model_of(nodes, constants, {"x": VALUE}, ["gate.out", "biased.out", "other.out"])
    before = evaluate(model, {"x": VALUE})
    graph = EditableGraph(model, tmp_path)
    take_in_biases(graph)
    assert not graph.nodes_of("Add")
    assert join_siblings(graph) == 2
    (joined,) = graph.nodes_of("MatMulNBits")
    assert joined.attribute("N") == 96
    for expected, found in zip(before, run(graph, {"x": VALUE}), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_linears_that_differ_stay_apart(tmp_path: Path) -> None:
    made = [linear("a", 16), linear("b", 16, zero_points=True), linear("c", 16, accuracy=4)]
    nodes = [node for node, _ in made] + [helper.make_node("Neg", [name], [f"{name}.out"]) for name in "abc"]
    constants = {name: value for _, each in made for name, value in each.items()}
    graph = EditableGraph(model_of(nodes, constants, {"x": VALUE}, ["a.out", "b.out", "c.out"]), tmp_path)
    assert join_siblings(graph) == 0


def test_activations_left_open_are_rounded(tmp_path: Path) -> None:
    made = [linear("a", 16, accuracy=0), linear("b", 16, accuracy=1)]
    constants = {name: value for _, each in made for name, value in each.items()}
    graph = EditableGraph(model_of([node for node, _ in made], constants, {"x": VALUE}, ["a", "b"]), tmp_path)
    assert round_activations(graph) == 1
    assert [node.attribute("accuracy_level") for node in graph.nodes_of("MatMulNBits")] == [4, 1]


def test_a_reshaped_constant_is_stored_once(tmp_path: Path) -> None:
    table = np.arange(1200, dtype=np.float32).reshape(30, 40)
    nodes = [
        helper.make_node("Reshape", ["table", "shape"], ["wide"]),
        helper.make_node("Gather", ["wide", "ids"], ["rows"]),
        helper.make_node("MatMul", ["rows", "table"], ["out"]),
    ]
    ids = np.array([1, 3])
    model = model_of(nodes, {"table": table, "shape": np.array([40, 0 - 1])}, {"ids": ids}, ["out"])
    graph = EditableGraph(model, tmp_path)
    share_reshaped(graph)
    assert not graph.nodes_of("Reshape")
    with WeightFile(tmp_path / "data") as data:
        written = graph.model(ToFile(data, lambda _: None))
        assert data.digest().bytes == table.nbytes
    places = {tuple((entry.key, entry.value) for entry in each.external_data) for each in written.graph.initializer}
    assert len(places) == 1
    np.testing.assert_array_equal(run(graph, {"ids": ids})[0], table.reshape(40, 30)[ids] @ table)


def test_constants_that_share_bytes_go_on_sharing_them(tmp_path: Path) -> None:
    table = np.arange(1200, dtype=np.float32)
    (tmp_path / "weights").write_bytes(table.tobytes())
    model = model_of([helper.make_node("MatMul", ["a", "b"], ["out"])], {}, {}, ["out"])
    for name, shape in (("a", (30, 40)), ("b", (40, 30))):
        proto = TensorProto(name=name, dims=shape, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
        proto.external_data.add(key="location", value="weights")
        model.graph.initializer.append(proto)
    graph = EditableGraph(model, tmp_path)
    with WeightFile(tmp_path / "data") as data:
        graph.model(ToFile(data, lambda _: None))
        assert data.digest().bytes == table.nbytes
    np.testing.assert_allclose(run_in_place(graph), table.reshape(30, 40) @ table.reshape(40, 30))


def run_in_place(graph: EditableGraph) -> Array:
    (out,) = ModelSession(graph.model(InPlace()), graph.folder).run(["out"], {})
    return out


def test_half_precision_is_widened_and_ties_stay(tmp_path: Path) -> None:
    table = np.random.default_rng(0).standard_normal((40, 20)).astype(np.float16)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Cast", ["rows"], ["typed"], to=TensorProto.FLOAT16),
        helper.make_node("Transpose", ["table"], ["turned"]),
        helper.make_node("MatMul", ["typed", "turned"], ["scores"]),
        helper.make_node("Cast", ["scores"], ["out"], to=TensorProto.FLOAT),
    ]
    ids = np.array([1, 3, 5])
    graph = EditableGraph(model_of(nodes, {"table": table}, {"ids": ids}, ["out"]), tmp_path)
    widen(graph)
    wide = table.astype(np.float32)
    for written in (graph.model(InPlace()), graph.model(InPlace())):
        np.testing.assert_allclose(evaluate(written, {"ids": ids})[0], wide[ids] @ wide.T, atol=1e-5)
    with WeightFile(tmp_path / "data") as data:
        graph.model(ToFile(data, lambda _: None))
        assert data.digest().bytes == wide.nbytes


@given(values=st.lists(st.integers(-8, 7), min_size=1, max_size=9), signed=st.booleans())
def test_four_bit_constants_are_unpacked(values: list[int], signed: bool) -> None:
    codes = values if signed else [value + 8 for value in values]
    kind = TensorProto.INT4 if signed else TensorProto.UINT4
    proto = helper.make_tensor("t", kind, [len(codes)], codes)
    assert read_tensor(proto, Path()).array().tolist() == codes


@given(data=st.binary(max_size=64), cut=st.integers(-3, 3), offset=st.integers(-2, 70))
def test_constants_beyond_their_file_are_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, cut: int, offset: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "weights").write_bytes(data)
    length = len(data) + cut
    proto = TensorProto(name="t", dims=[max(length, 0)], data_type=TensorProto.UINT8)
    proto.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "weights"), ("offset", offset), ("length", length)):
        proto.external_data.add(key=key, value=str(value))
    if length >= 0 and offset >= 0 and offset + length <= len(data):
        assert read_tensor(proto, folder).array().tobytes() == data[offset : offset + length]
    else:
        with pytest.raises(BundleError, match="the model's constant t is damaged"):
            read_tensor(proto, folder)


def chain(length: int) -> tuple[list[NodeProto], dict[str, Array]]:
    nodes = [helper.make_node("Add", [f"v{index}", "one"], [f"v{index + 1}"]) for index in range(length)]
    return nodes, {"one": np.ones(1, np.float32)}


@given(order=st.permutations(range(6)))
def test_nodes_come_out_in_order(order: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    nodes, constants = chain(6)
    shuffled = model_of([nodes[index] for index in order], constants, {"v0": np.zeros(1, np.float32)}, ["v6"])
    graph = EditableGraph(shuffled, tmp_path_factory.getbasetemp())
    assert [node.output(0) for node in graph.in_order()] == [f"v{index + 1}" for index in range(6)]


def test_edits_keep_the_look_ups_right(tmp_path: Path) -> None:
    nodes, constants = chain(3)
    nodes.append(helper.make_node("Identity", ["v3"], ["out"]))
    graph = EditableGraph(model_of(nodes, constants, {"v0": np.zeros(1, np.float32)}, ["out"]), tmp_path)
    assert [node.output(0) for node in graph.nodes] == ["v1", "v2", "out"]
    negated = graph.add("Neg", ["v1"], name="v2")  # a taken name gets a number
    assert negated.outputs == ("v2.2",)
    graph.replace_uses("v2", negated.output(0))
    graph.sweep()
    assert graph.producer("v2") is None
    assert [node.op for node in graph.in_order()] == ["Add", "Neg", "Add"]
    graph.rename("v1", "first")
    graph.rename("v0", "zero")
    zero = np.zeros(1, np.float32)
    assert run(graph, {"zero": zero})[0].tolist() == [0.0]
    assert list(graph.tensors) == ["one"]
    with pytest.raises(ValueError, match="one is taken"):
        graph.rename("first", "one")


def test_a_cycle_is_damage(tmp_path: Path) -> None:
    nodes = [helper.make_node("Neg", ["b"], ["a"]), helper.make_node("Neg", ["a"], ["b"])]
    graph = EditableGraph(model_of(nodes, {}, {}, ["b"]), tmp_path)
    with pytest.raises(BundleError, match="has a cycle"):
        graph.in_order()


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("slope", [0.0, 0.5])
def test_what_a_bias_says_is_found_by_experiment(window: int, slope: float, tmp_path: Path) -> None:
    """A bias over slots made from the mask's length: causal, or within a window; a slope is neither."""
    nodes = [
        helper.make_node("Shape", ["attention_mask"], ["whole"]),
        helper.make_node("Gather", ["whole", "last"], ["total"]),
        helper.make_node("Shape", ["input_ids"], ["new"]),
        helper.make_node("Gather", ["new", "last"], ["rows"]),
        helper.make_node("Sub", ["total", "rows"], ["past"]),
        helper.make_node("Range", ["zero", "total", "one"], ["slots"]),
        helper.make_node("Range", ["past", "total", "one"], ["queries"]),
        helper.make_node("Unsqueeze", ["queries", "last"], ["columns"]),
        helper.make_node("Sub", ["columns", "slots"], ["distance"]),
        helper.make_node("Less", ["distance", "limit"], ["near"]),
        helper.make_node("GreaterOrEqual", ["distance", "zero"], ["before"]),
        helper.make_node("And", ["near", "before"], ["seen"]),
        helper.make_node("Cast", ["distance"], ["far"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["far", "slope"], ["sloped"]),
        helper.make_node("Where", ["seen", "sloped", "hidden"], ["flat"]),
        helper.make_node("Unsqueeze", ["flat", "front"], ["bias"]),
    ]
    constants: dict[str, Array] = {
        **{
            name: np.array(value)
            for name, value in {"last": 1, "zero": 0, "one": 1, "limit": window or 1 << 40}.items()
        },
        "slope": np.array(slope, np.float32),
        "hidden": np.array(-3e38, np.float32),
        "front": np.array([0, 1]),
    }
    inputs: dict[str, Array] = {"input_ids": np.zeros((1, 1), np.int64), "attention_mask": np.zeros((1, 1), np.int64)}
    model = model_of(nodes, constants, inputs, ["bias"])
    for port, extent in zip(model.graph.input, ("rows", "total"), strict=True):
        port.type.tensor_type.shape.dim[1].dim_param = extent
    graph = EditableGraph(model, tmp_path)
    if slope:
        with pytest.raises(BundleError, match="neither a mask nor a window"):
            window_of_bias(graph, "bias", 100)
    else:
        assert window_of_bias(graph, "bias", 100) == window
        assert window_of_bias(graph, "bias", 30) == 0  # in so short a text it hides nothing


def test_a_graph_is_read_without_its_weights(tiny_bundle: Path) -> None:
    graph = EditableGraph.open(tiny_bundle / "model.onnx")
    name = next(name for name, tensor in graph.tensors.items() if tensor.nbytes > 10_000)
    whole = {each.name: numpy_helper.to_array(each) for each in onnx.load(tiny_bundle / "model.onnx").graph.initializer}
    np.testing.assert_array_equal(graph.array(name), whole[name])
    assert Tensor.of(whole[name]).nbytes == graph.tensors[name].nbytes
