"""Rewritten quantized linears compute what they computed before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import NodeProto, helper

from edgerun.export.check.contract_session import evaluate
from edgerun.export.graph.initializers import WeightFile
from edgerun.export.quantization.codes import quantize_rows
from edgerun.export.upgrade.editable import MICROSOFT, EditableGraph
from edgerun.export.upgrade.graph_parts import in_place, to_file
from edgerun.export.upgrade.quantized_linears import (
    absorb_biases,
    join_linears,
    round_activations,
    share_reshaped_constants,
)
from edgerun.models.manifest import WeightFormat
from support.small_graphs import Array, model_of

K, BLOCK = 64, 32
VALUE = np.random.default_rng(0).standard_normal((1, 3, K)).astype(np.float32)


def linear(name: str, width: int, zero_points: bool = False, accuracy: int = 1) -> tuple[NodeProto, dict[str, Array]]:
    """A MatMulNBits over `x`, and its constants."""
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


def test_linears_of_different_formats_are_not_joined(tmp_path: Path) -> None:
    linears = [linear("a", 16), linear("b", 16, zero_points=True), linear("c", 16, accuracy=4)]
    nodes = [node for node, _ in linears] + [helper.make_node("Neg", [name], [f"{name}.out"]) for name in "abc"]
    constants = {name: value for _, each in linears for name, value in each.items()}
    graph = EditableGraph(model_of(nodes, constants, {"x": VALUE}, ["a.out", "b.out", "c.out"]), tmp_path)
    join_linears(graph)
    assert len(graph.nodes_of("MatMulNBits")) == 3


def test_linears_without_accuracy_level_round_activations(tmp_path: Path) -> None:
    linears = [linear("a", 16, accuracy=0), linear("b", 16, accuracy=1)]
    constants = {name: value for _, each in linears for name, value in each.items()}
    graph = EditableGraph(model_of([node for node, _ in linears], constants, {"x": VALUE}, ["a", "b"]), tmp_path)
    assert round_activations(graph) == 1
    assert [node.attribute("accuracy_level") for node in graph.nodes_of("MatMulNBits")] == [4, 1]


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
