"""Finding and checking the external data files of ONNX models."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun import BundleError
from edgerun.models.onnx_file.wire import check_external_data, external_files
from support.nightly import examples

onnx = pytest.importorskip("onnx", reason="needs the export extra")


def tensor(location: str, *, value_first: bool = False) -> onnx.TensorProto:
    proto = onnx.TensorProto(name="w", data_type=1, dims=[1], data_location=onnx.TensorProto.EXTERNAL)
    if value_first:
        # The same entry with its fields in the other order, which protobuf allows.
        name = location.encode()
        body = b"\x12" + bytes([len(name)]) + name + b"\x0a\x08location"
        proto.MergeFromString(b"\x6a" + bytes([len(body)]) + body)
    else:
        proto.external_data.add(key="location", value=location)
        proto.external_data.add(key="offset", value="0")
    return proto


def places(proto: onnx.TensorProto) -> dict[str, onnx.ModelProto]:
    """Models with the tensor in every place where onnx.proto allows one."""
    models = {
        name: onnx.ModelProto(ir_version=10) for name in ("initializer", "attribute", "subgraph", "sparse", "function")
    }
    models["initializer"].graph.initializer.append(proto)
    models["attribute"].graph.node.add(op_type="Constant").attribute.add(name="value", type=4).t.CopyFrom(proto)
    models["subgraph"].graph.node.add(op_type="If").attribute.add(name="then", type=5).g.initializer.append(proto)
    models["sparse"].graph.sparse_initializer.add().values.CopyFrom(proto)
    models["function"].functions.add(name="f").node.add(op_type="C").attribute.add(name="v", type=9).tensors.append(
        proto
    )
    return models


@pytest.mark.parametrize("place", ["initializer", "attribute", "subgraph", "sparse", "function"])
@pytest.mark.parametrize("value_first", [False, True])
def test_external_files_are_found_wherever_a_tensor_can_be(tmp_path: Path, place: str, value_first: bool) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(places(tensor("weights.bin", value_first=value_first))[place].SerializeToString())
    assert external_files(path) == ["weights.bin"]


@pytest.mark.parametrize(
    "location", ["../x", "/etc/passwd", "a/../../x", "C:\\x", "..\\x", "\\\\host\\x", "c:x", "", "//host/x"]
)
def test_names_outside_the_folder_are_refused(tmp_path: Path, location: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(places(tensor(location))["initializer"].SerializeToString())
    with pytest.raises(BundleError, match=r"outside its folder; do not use this model"):
        check_external_data(path)


def test_missing_and_truncated_files_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(places(tensor("sub/weights.bin"))["initializer"].SerializeToString())
    with pytest.raises(BundleError, match=r"keeps weights in sub/weights\.bin, which is missing; copy the whole model"):
        check_external_data(path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "weights.bin").write_bytes(b"1234")
    check_external_data(path)
    proto = tensor("weights.bin")
    del proto.external_data[:]
    for key, value in {"location": "weights.bin", "offset": "6", "length": "4"}.items():
        proto.external_data.add(key=key, value=value)
    path, weights = tmp_path / "model.onnx", tmp_path / "weights.bin"
    path.write_bytes(places(proto)["subgraph"].SerializeToString())
    weights.write_bytes(b"123456789")
    with pytest.raises(BundleError, match=r"weights\.bin is damaged: 9 bytes, 10 expected; copy the whole"):
        check_external_data(path)
    weights.write_bytes(b"1234567890")
    check_external_data(path)


@pytest.mark.parametrize("length", ["", "-1", "1e3", "9" * 5000])
def test_invalid_lengths_are_left_to_the_runtime(tmp_path: Path, length: str) -> None:
    proto = tensor("weights.bin")
    proto.external_data.add(key="length", value=length)
    (tmp_path / "model.onnx").write_bytes(places(proto)["initializer"].SerializeToString())
    (tmp_path / "weights.bin").write_bytes(b"")
    check_external_data(tmp_path / "model.onnx")


@given(st.binary(max_size=200))
@settings(max_examples=examples(300))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.onnx"
    path.write_bytes(data)
    with suppress(BundleError):
        external_files(path)


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    body = b""
    for tag in [b"\x32", b"\x2a", b"\x0a"] * 200 + [b"\x3a"]:  # attribute.g, node.attribute, graph.node; model.graph
        size, length = len(body), b""
        while size > 0x7F:
            length += bytes([size & 0x7F | 0x80])
            size >>= 7
        body = tag + length + bytes([size]) + body
    path = tmp_path / "model.onnx"
    path.write_bytes(body)
    with pytest.raises(BundleError, match="nested too deeply"):
        external_files(path)


def test_the_bytes_of_inline_weights_are_not_read_as_names(tmp_path: Path) -> None:
    model = onnx.ModelProto(ir_version=10)
    bait = tensor("../x").SerializeToString()
    model.graph.initializer.append(onnx.TensorProto(name="w", data_type=2, dims=[len(bait)], raw_data=bait))
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    assert external_files(path) == []
