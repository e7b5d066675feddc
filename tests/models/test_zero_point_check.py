"""The check of a machine's kernels for zero points, and what is refused where it fails."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from edgerun.errors import BundleError, ExportError
from edgerun.export import INT4, ExportRecipe, ExportRequest, WeightFormat, export_checkpoint
from edgerun.export.check import contract_session as export_session
from edgerun.export.check.contract_session import multiplies_zero_points
from edgerun.models.bundle import open_bundle
from edgerun.models.onnx_file.operators import operators_of
from edgerun.models.zero_point_check import INPUT, INPUTS, OUTPUTS, zero_point_model, zero_points_work
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph import session as runtime_session
from edgerun.runtime.graph.metadata import metadata_of
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from support.tiny_models import write_bundle, write_checkpoint

POINTS = WeightFormat(4, 32, zero_points=True)


def run(model: bytes, rows):
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return session.run(None, {INPUT: rows})[0]


def damaged() -> bytes:
    """The model with other zero points: what a kernel that reads them wrongly computes."""
    model = onnx.load_from_string(zero_point_model())
    points = next(each for each in model.graph.initializer if each.name == "zero_points")
    points.raw_data = bytes(255 - byte for byte in points.raw_data)
    return bytes(model.SerializeToString())


def open_graph(bundle: Path) -> GraphSession:
    return GraphSession(bundle / "model.onnx", SessionConfig(choose_device("cpu"), 1), metadata_of(open_bundle(bundle)))


def test_the_model_is_a_model() -> None:
    model = onnx.load_from_string(zero_point_model())
    onnx.checker.check_model(model)
    (node,) = model.graph.node
    assert node.op_type == "MatMulNBits"
    shapes = {each.name: numpy_helper.to_array(each).shape for each in model.graph.initializer}
    assert shapes == {"codes": (96, 8, 16), "scales": (96, 8), "zero_points": (96, 4)}
    assert run(zero_point_model(), np.zeros((3, INPUTS), np.float32)).shape == (3, OUTPUTS)


def test_this_machine_multiplies_rightly() -> None:
    assert zero_points_work(lambda rows: run(zero_point_model(), rows))
    assert not zero_points_work(lambda rows: run(damaged(), rows))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("wrong", [0.5, np.nan])
def test_one_row_and_two_are_both_tried(count: int, wrong: float) -> None:
    def multiply(rows):
        products = run(zero_point_model(), rows)
        return products * np.float32(wrong) if len(rows) == count else products

    assert not zero_points_work(multiply)


@pytest.fixture
def wrong_kernels(monkeypatch):
    for module, remembered in (
        (export_session, export_session.multiplies_zero_points),
        (runtime_session, runtime_session._multiplies_zero_points),
    ):
        monkeypatch.setattr(module, "zero_point_model", damaged)
        remembered.cache_clear()
    yield
    export_session.multiplies_zero_points.cache_clear()
    runtime_session._multiplies_zero_points.cache_clear()


def test_a_machine_that_does_not_refuses_models_with_zero_points(tmp_path, wrong_kernels) -> None:
    (tmp_path / "4").mkdir()
    with pytest.raises(ExportError, match="multiplies wrongly by weights of 4 bits with zero points on this"):
        write_bundle(tmp_path / "4", weights=POINTS)
    assert [path.name for path in (tmp_path / "4").iterdir()] == ["checkpoint"]
    open_graph(write_bundle(tmp_path / "without", weights=INT4))
    open_graph(write_bundle(tmp_path / "8", weights=WeightFormat(8, 32, zero_points=True)))


def test_it_refuses_to_run_them_too(tmp_path, request) -> None:
    bundle = write_bundle(tmp_path, weights=ExportRecipe(INT4, head=POINTS))
    open_graph(bundle)
    request.getfixturevalue("wrong_kernels")
    message = r"model.onnx has weights of 4 bits with zero points, which ONNX Runtime .* multiplies wrongly"
    with pytest.raises(BundleError, match=message):
        open_graph(bundle)
    (bundle / "edge.json").unlink()
    with pytest.raises(BundleError, match=message):
        open_graph(bundle)


@pytest.mark.parametrize(
    ("form", "level", "concerned"),
    [(POINTS, 4, True), (POINTS, 1, False), (WeightFormat(8, 32, zero_points=True), 4, False), (INT4, 4, False)],
    ids=str,
)
def test_graphs_that_are_concerned(tmp_path, form: WeightFormat, level: int, concerned: bool) -> None:
    bundle = export_checkpoint(
        ExportRequest(write_checkpoint(tmp_path / "c"), tmp_path / "b", ExportRecipe(form))
    ).bundle
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = level
    (bundle / "model.onnx").write_bytes(model.SerializeToString())
    operators = operators_of(bundle / "model.onnx")
    assert operators.zero_points is concerned
    assert "MatMulNBits" in operators
    assert multiplies_zero_points()
