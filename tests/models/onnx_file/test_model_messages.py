"""Messages without the onnx package: what they write, onnx reads, and the reverse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from edgerun import errors
from edgerun.models.onnx_file import model_messages as messages


def small_model() -> onnx.ModelProto:
    """A model with every part that the messages declare and some that they do not."""
    weights = numpy_helper.from_array(np.arange(6, dtype=np.float32).reshape(2, 3), "w")
    node = helper.make_node("Gemm", ["x", "w"], ["y"], "product", alpha=2.0, transB=0, doc_string="kept")
    graph = helper.make_graph(
        [node],
        "small",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["M", 2])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["M", 3])],
        [weights],
        doc_string="kept as well",
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    model.metadata_props.add(key="made by", value="a test")
    return model


def test_a_model_comes_through_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    onnx.save(small_model(), file)
    read = messages.read_model(file)
    assert [node.op_type for node in read.graph.node] == ["Gemm"]
    assert messages.attribute_values(read.graph.node[0]) == {"alpha": 2.0, "transB": 0}
    assert messages.shape_of(read.graph.input[0]) == ("M", 2)
    assert onnx.load_from_string(read.SerializeToString()) == small_model()


def test_a_model_that_is_built_passes_the_checker_and_runs() -> None:
    table = np.arange(12, dtype=np.float16).reshape(4, 3)
    graph = messages.GraphProto(
        name="rows",
        node=[
            messages.node("Gather", ["table", "ids"], ["rows"], axis=0),
            messages.node("Cast", ["rows"], ["wide"], to=1),
            messages.node("Transpose", ["wide"], ["y"], perm=[1, 0]),
            messages.node("Constant", [], ["c"], value=np.array([1, -2], np.int64)),
            messages.node("LeakyRelu", ["y"], ["z"], alpha=0.5),
        ],
        initializer=[messages.tensor("table", table)],
        input=[messages.value_info("ids", np.int64, ["N"])],
        output=[messages.value_info("z", np.float32, [3, "N"]), messages.value_info("c", np.int64, [2])],
    )
    written = messages.model(graph, opset=21).SerializeToString()
    onnx.checker.check_model(onnx.load_from_string(written), full_check=True)
    session = ort.InferenceSession(written, providers=["CPUExecutionProvider"])
    rows, constant = session.run(None, {"ids": np.array([3, 1])})
    assert np.array_equal(rows, table[[3, 1]].T.astype(np.float32))
    assert constant.tolist() == [1, -2]


def test_attributes_are_set_and_replaced() -> None:
    node = messages.node("Op", ["a"], ["b"])
    for value in (3, -1, 0.5, "text", [1, 2], [0.5, 1.5]):
        messages.set_attribute(node, "name", value)
        assert messages.attribute_values(node) == {"name": value}
    onnx_node = onnx.NodeProto.FromString(node.SerializeToString())
    assert helper.get_attribute_value(onnx_node.attribute[0]) == [0.5, 1.5]


def test_invalid_models_are_errors(tmp_path: Path) -> None:
    for content in (b"no model", b"\x3a\xff not a model"):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(errors.BundleError, match="is not an ONNX model"):
            messages.read_model(tmp_path / "bad")
