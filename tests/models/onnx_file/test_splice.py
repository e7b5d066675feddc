"""Replacing the external tensors of a graph by those of another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from edgerun import BundleError
from edgerun.models.onnx_file.model_messages import with_tensors_of

NAMES = ("weight", "gewicht \u00e4", "w" * 200)


def elsewhere(name: str, offset: int) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[3], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "weights"), ("offset", str(offset)), ("length", "12")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def inline(name: str, size: int) -> TensorProto:
    return numpy_helper.from_array(np.arange(size, dtype=np.float32), name)


def model(tensors: list[TensorProto]) -> onnx.ModelProto:
    node = helper.make_node("Identity", [tensors[0].name], ["out"])
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "graph", [], [out], tensors)
    made = helper.make_model(graph, ir_version=10, producer_name="test")
    made.metadata_props.add(key="behind", value="the graph")
    return made


def spliced(folder: Path, first: onnx.ModelProto, second: onnx.ModelProto) -> bytes:
    for name, each in (("first", first), ("second", second)):
        (folder / name).write_bytes(each.SerializeToString())
    return with_tensors_of(folder / "first", folder / "second")


@given(
    mine=st.lists(st.sampled_from(NAMES), min_size=1, unique=True),
    sizes=st.lists(st.integers(1, 70), min_size=3, max_size=3),
)
def test_only_external_tensors_are_replaced(
    tmp_path_factory: pytest.TempPathFactory, mine: list[str], sizes: list[int]
) -> None:
    kept = inline("kept", sizes[0])
    others = [elsewhere(name, 1000 * number) for number, name in enumerate(NAMES)]
    others[1] = inline(NAMES[1], sizes[1] * 40)  # longer than what it replaces, so lengths change
    first = model([*(elsewhere(name, 7) for name in mine), kept])
    found = onnx.load_model_from_string(
        spliced(tmp_path_factory.mktemp("s"), first, model([*others, inline("kept", 1)]))
    )
    expected = onnx.ModelProto()
    expected.CopyFrom(first)
    by_name = {tensor.name: tensor for tensor in others}
    for tensor in expected.graph.initializer:
        if tensor.name in by_name:
            tensor.CopyFrom(by_name[tensor.name])
    assert found == expected


def test_a_tensor_that_the_other_file_lacks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mine"):
        spliced(tmp_path, model([elsewhere("mine", 0)]), model([elsewhere("theirs", 0)]))


def test_invalid_models_are_errors(tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(model([inline("a", 2)]).SerializeToString())
    (tmp_path / "bad").write_bytes(b"no model")
    for pair in (("good", "bad"), ("bad", "good")):
        with pytest.raises(BundleError, match="is not an ONNX model"):
            with_tensors_of(*(tmp_path / name for name in pair))
