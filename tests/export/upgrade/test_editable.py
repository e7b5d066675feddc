"""Edits of a graph keep it valid; constants are unpacked, and bounded by their files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from edgerun.errors import BundleError
from edgerun.export.upgrade.editable import EditableGraph
from edgerun.export.upgrade.graph_parts import in_place, read_tensor
from support.small_graphs import add_chain, evaluate, model_of


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


@given(values=st.lists(st.integers(-8, 7), min_size=1, max_size=9), signed=st.booleans())
def test_4_bit_constants_are_unpacked(values: list[int], signed: bool) -> None:
    codes = values if signed else [value + 8 for value in values]
    element_type = TensorProto.INT4 if signed else TensorProto.UINT4
    proto = helper.make_tensor("t", element_type, [len(codes)], codes)
    assert read_tensor(proto, Path()).array().tolist() == codes


@given(data=st.binary(max_size=64), cut=st.integers(-3, 3), offset=st.integers(-2, 70))
def test_constants_beyond_the_end_of_their_file_are_refused(
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
        assert len({read_tensor(proto, folder).source for _ in range(2)}) == 1  # equal ranges are written once
    else:
        with pytest.raises(BundleError, match="the model's constant t is damaged"):
            read_tensor(proto, folder)
