"""Edits of a graph keep it valid and its look-up tables consistent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from edgerun.errors import BundleError
from edgerun.export.check.contract_session import evaluate
from edgerun.export.upgrade.editable import EditableGraph
from edgerun.export.upgrade.graph_parts import Tensor, in_place
from support.small_graphs import add_chain, model_of


@given(order=st.permutations(range(6)))
def test_nodes_are_sorted_topologically(order: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    nodes, constants = add_chain(6)
    shuffled = model_of([nodes[index] for index in order], constants, {"v0": np.zeros(1, np.float32)}, ["v6"])
    graph = EditableGraph(shuffled, tmp_path_factory.getbasetemp())
    assert [node.output(0) for node in graph.in_order()] == [f"v{index + 1}" for index in range(6)]


def test_edits_keep_look_up_tables_consistent(tmp_path: Path) -> None:
    nodes, constants = add_chain(3)
    nodes.append(helper.make_node("Identity", ["v3"], ["out"]))
    graph = EditableGraph(model_of(nodes, constants, {"v0": np.zeros(1, np.float32)}, ["out"]), tmp_path)
    assert [node.output(0) for node in graph.nodes] == ["v1", "v2", "out"]
    negated = graph.add("Neg", ["v1"], name="v2")  # a number is appended to a taken name
    assert negated.outputs == ("v2.2",)
    graph.replace_uses("v2", negated.output(0))
    graph.sweep()
    assert graph.producer("v2") is None
    assert [node.op for node in graph.in_order()] == ["Add", "Neg", "Add"]
    graph.rename("v1", "first")
    graph.rename("v0", "zero")
    zero = np.zeros(1, np.float32)
    assert evaluate(graph.model(in_place), {"zero": zero})[0].tolist() == [0.0]
    assert list(graph.tensors) == ["one"]
    with pytest.raises(ValueError, match="one is taken"):
        graph.rename("first", "one")


def test_cycle_is_refused(tmp_path: Path) -> None:
    nodes = [helper.make_node("Neg", ["b"], ["a"]), helper.make_node("Neg", ["a"], ["b"])]
    graph = EditableGraph(model_of(nodes, {}, {}, ["b"]), tmp_path)
    with pytest.raises(BundleError, match="has a cycle"):
        graph.in_order()


def test_graph_is_read_without_its_weights(tiny_bundle: Path) -> None:
    graph = EditableGraph.open(tiny_bundle / "model.onnx")
    name = next(name for name, tensor in graph.tensors.items() if tensor.nbytes > 10_000)
    whole = {each.name: numpy_helper.to_array(each) for each in onnx.load(tiny_bundle / "model.onnx").graph.initializer}
    np.testing.assert_array_equal(graph.array(name), whole[name])
    assert Tensor.of(whole[name]).nbytes == graph.tensors[name].nbytes
