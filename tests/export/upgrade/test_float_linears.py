"""Quantized float linears compute with the weights that their codes represent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from edgerun.export import FP32
from edgerun.export.graph.initializers import WeightFile
from edgerun.export.quantization.codes import dequantized, nearest_rows
from edgerun.export.upgrade.editable import EditableGraph
from edgerun.export.upgrade.float_linears import Matrix, quantize_linears, rounded, widen
from edgerun.export.upgrade.graph_parts import Array, Computed, Tensor, in_place, to_file
from edgerun.export.upgrade.quantized_linears import absorb_biases, join_linears
from edgerun.models.manifest import WeightFormat
from support.small_graphs import Nodes, evaluate, model_of

Floats = npt.NDArray[np.float32]
VOCABULARY, WIDTH, INNER = 70, 48, 40
FORMATS = [WeightFormat(4, 32), WeightFormat(8, 32), WeightFormat(4, 64)]


def weights(name: str, rows: int, columns: int) -> Floats:
    """A random matrix [rows, columns] that depends on the name."""
    return np.random.default_rng(sum(name.encode())).standard_normal((rows, columns)).astype(np.float32)


BIAS = np.linspace(-1, 1, INNER).astype(np.float32)


def decoder(head: str) -> onnx.ModelProto:
    """Two linears on the embedding, a Gemm behind their product, and a head; `head` says how that is stored."""
    nodes = Nodes(18)
    table = nodes.constant(weights("table", VOCABULARY, WIDTH), np.float32, "table")
    value = nodes.op("Gather", table, "input_ids")
    up = nodes.linear(value, "up", weights("up", INNER, WIDTH))
    gate = nodes.op("Add", nodes.linear(value, "gate", weights("gate", INNER, WIDTH)), nodes.constant(BIAS, np.float32))
    flat = nodes.op("Reshape", nodes.op("Mul", nodes.op("Tanh", gate), up), nodes.constant([-1, INNER]))
    down = nodes.constant(weights("down", WIDTH, INNER), np.float32, "down")
    bias = nodes.constant(np.full(WIDTH, 0.25), np.float32)
    fed = nodes.op("Reshape", nodes.op("Gemm", flat, down, bias, transB=1), nodes.constant([1, -1, WIDTH]))
    last = nodes.op("Add", value, fed)
    if head == "same tensor":
        nodes.op("MatMul", last, nodes.op("Transpose", table, perm=[1, 0]), outputs=["logits"])
    else:
        matrix = weights("table" if head == "same values" else "head", VOCABULARY, WIDTH)
        nodes.op("MatMul", last, nodes.constant(matrix.T, np.float32, "head"), outputs=["logits"])
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "new"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "new", VOCABULARY])
    return nodes.model([ids], [logits])


def expected(head: str, ids: npt.NDArray[np.int64], weight_format: WeightFormat, head_format: WeightFormat) -> Floats:
    """The same in NumPy with the weights that the codes stand for."""

    def read(name: str, rows: int, columns: int, weight_format: WeightFormat) -> Floats:
        matrix = weights(name, rows, columns)
        if weight_format.bits == 32:
            return matrix
        return dequantized(nearest_rows(matrix, weight_format), columns, weight_format)

    table = read("table", VOCABULARY, WIDTH, head_format)
    value = table[ids]
    gate = value @ read("gate", INNER, WIDTH, weight_format).T + BIAS
    inner = np.tanh(gate) * (value @ read("up", INNER, WIDTH, weight_format).T)
    last = value + inner @ read("down", WIDTH, INNER, weight_format).T + np.float32(0.25)
    logits: Floats = last @ (read("head", VOCABULARY, WIDTH, head_format) if head == "untied" else table).T
    return logits


def logits_of(graph: EditableGraph, ids: npt.NDArray[np.int64]) -> Floats:
    for node in graph.nodes_of("MatMulNBits"):
        graph.set_attribute(node, "accuracy_level", 1)  # float activations, to see the weights alone
    out: Floats = evaluate(graph.model(in_place), {"input_ids": ids[None]})[0][0]
    return out


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
@pytest.mark.parametrize("head", ["same tensor", "same values", "untied"])
def test_linears_compute_with_dequantized_weights(head: str, weight_format: WeightFormat) -> None:
    graph = EditableGraph(decoder(head), Path())
    quantize_linears(graph, weight_format, WeightFormat(8, 32))
    assert not graph.nodes_of("MatMul", "Gemm", "Transpose")
    absorb_biases(graph)
    assert len(graph.nodes_of("MatMulNBits")) == 4
    join_linears(graph)
    assert len(graph.nodes_of("MatMulNBits")) == 3
    (gather,) = graph.nodes_of("GatherBlockQuantized")
    (last,) = (node for node in graph.nodes_of("MatMulNBits") if node.attribute("N") == VOCABULARY)
    pairs = zip((gather.input(0), gather.input(2)), last.inputs[1:3], strict=True)
    shared = [graph.tensors[first].source is graph.tensors[second].source for first, second in pairs]
    assert shared == [head != "untied"] * 2  # a tied head has the bytes of the embedding
    ids = np.arange(VOCABULARY)
    np.testing.assert_allclose(
        logits_of(graph, ids), expected(head, ids, weight_format, WeightFormat(8, 32)), atol=2e-3
    )


def test_linears_of_format_fp32_are_not_quantized() -> None:
    graph = EditableGraph(decoder("untied"), Path())
    quantize_linears(graph, FP32, FORMATS[1])
    assert len(graph.nodes_of("MatMulNBits")) == len(graph.nodes_of("GatherBlockQuantized")) == 1
    ids = np.array([3, 9])
    np.testing.assert_allclose(logits_of(graph, ids), expected("untied", ids, FP32, FORMATS[1]), atol=2e-3)
    graph = EditableGraph(decoder("untied"), Path())
    quantize_linears(graph, FORMATS[0], FP32)
    assert [node.attribute("N") for node in graph.nodes_of("MatMulNBits")].count(VOCABULARY) == 0
    np.testing.assert_allclose(logits_of(graph, ids), expected("untied", ids, FORMATS[0], FP32), atol=2e-3)


@settings(max_examples=30)
@given(
    rows=st.integers(1, 90),
    columns=st.integers(1, 90),
    weight_format=st.sampled_from(FORMATS),
    transposed=st.booleans(),
    codes_first=st.booleans(),
    dtype=st.sampled_from([np.float32, np.float16]),
)
def test_matrix_is_rounded_by_row_in_both_layouts(
    rows: int, columns: int, weight_format: WeightFormat, transposed: bool, codes_first: bool, dtype: npt.DTypeLike
) -> None:
    matrix = weights("any", rows, columns).astype(dtype)
    stored = rounded(Matrix(Tensor.of(matrix.T if transposed else matrix), transposed), weight_format)
    expected = nearest_rows(matrix.astype(np.float32), weight_format)[:2]
    for tensor, array in list(zip(stored, expected, strict=True))[:: 1 if codes_first else -1]:
        np.testing.assert_array_equal(tensor.array(), array)


def test_large_matrix_is_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most a few megabytes of a matrix are read at once."""
    sizes: list[int] = []
    read = Matrix.rows

    def rows(self: Matrix, start: int, stop: int) -> Floats:
        part = read(self, start, stop)
        sizes.append(part.size)
        return part

    monkeypatch.setattr(Matrix, "rows", rows)
    size = 3000
    matrix = Matrix(Tensor.of(np.zeros((size, size), np.float32)), transposed=True)
    parts: Iterator[Array] = rounded(matrix, FORMATS[0])[0].source.pieces()
    assert sum(part.nbytes for part in parts) == size * 94 * 16
    assert sum(sizes) == size * size
    assert max(sizes) <= 1 << 22
    assert len(sizes) == 3


def test_weights_shared_by_layers_are_rounded_once() -> None:
    model = decoder("untied")
    for node in model.graph.node:
        node.input[:] = [name.replace("up.", "gate.") for name in node.input]
    graph = EditableGraph(model, Path())
    quantize_linears(graph, FORMATS[0], FORMATS[0])
    linears = graph.nodes_of("MatMulNBits")
    assert len(linears) == 4
    assert len({graph.tensors[node.input(1)].source for node in linears}) == 3


def test_half_precision_is_rounded_without_a_float32_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    whole: list[int] = []
    read = Computed.read

    def noted(self: Computed) -> Array:
        whole.append(self.length if self.widens else 0)
        return read(self)

    monkeypatch.setattr(Computed, "read", noted)
    logits = []
    for dtype in (np.float32, np.float16):
        model = decoder("same tensor")
        for constant in model.graph.initializer:
            if constant.data_type == TensorProto.FLOAT:
                values = onnx.numpy_helper.to_array(constant).astype(np.float16).astype(dtype)
                constant.CopyFrom(onnx.numpy_helper.from_array(values, constant.name))
        graph = EditableGraph(model, Path())
        widen(graph)
        quantize_linears(graph, FORMATS[0], FORMATS[0])
        logits.append(logits_of(graph, np.arange(VOCABULARY)))
    np.testing.assert_array_equal(*logits)
    assert 0 < max(whole) <= 4 * WIDTH  # biases


def test_half_precision_is_converted_and_tied_matrices_stay_tied(tmp_path: Path) -> None:
    table = np.random.default_rng(0).standard_normal((40, 20)).astype(np.float16)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Cast", ["rows"], ["typed"], to=TensorProto.FLOAT16),
        helper.make_node("Transpose", ["table"], ["transposed"]),
        helper.make_node("MatMul", ["typed", "transposed"], ["scores"]),
        helper.make_node("Cast", ["scores"], ["out"], to=TensorProto.FLOAT),
    ]
    ids = np.array([1, 3, 5])
    graph = EditableGraph(model_of(nodes, {"table": table}, {"ids": ids}, ["out"]), tmp_path)
    widen(graph)
    wide = table.astype(np.float32)
    for written in (graph.model(in_place), graph.model(in_place)):
        np.testing.assert_allclose(evaluate(written, {"ids": ids})[0], wide[ids] @ wide.T, atol=1e-5)
    with WeightFile(tmp_path / "data") as data:
        graph.model(to_file(data, lambda _: None))
        assert data.digest().bytes == wide.nbytes
