"""Whatever is done to a foreign model, its upgrade computes what it does, or one line says why there is none."""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path

import onnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgerun.errors import EdgeError
from edgerun.export import FP32, ExportRecipe, ExportRequest, upgrade_model
from support.folder_edits import FileEdit, file_edits
from support.graph_edits import GraphEdit, graph_edits
from support.layouts import LAYOUTS, write_layout

BASES = ("optimum-external-many", "optimum-merged", "renamed-genai", "genai-float16", "community", "genai-window-cache")
fuzzing = settings(max_examples=15, suppress_health_check=list(HealthCheck))


@cache
def original(name: str) -> Path:
    """The layout as it should be."""
    return write_layout(Path(tempfile.mkdtemp(prefix="layout")), LAYOUTS[name])


def check(where: Path) -> None:
    """Upgrade the model in `where`/model; what comes out has passed the comparison with its source."""
    refusal = None
    try:
        upgrade_model(ExportRequest(where / "model", where / "out", ExportRecipe(FP32)))
    except EdgeError as error:
        refusal = str(error)
    assert {path.name for path in where.iterdir()} == ({"model", "out"} if refusal is None else {"model"})
    assert refusal is None or (refusal.strip() and "\n" not in refusal)


@fuzzing
@given(name=st.sampled_from(BASES), edits=st.lists(graph_edits(), min_size=1, max_size=3))
def test_changed_graphs(name: str, edits: list[GraphEdit]) -> None:
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where) / "model"
        shutil.copytree(original(name), folder)
        for path in folder.rglob("*.onnx"):
            model = onnx.load(path, load_external_data=False)
            for edit in edits:
                edit.apply(model)
            path.write_bytes(model.SerializeToString())
        check(Path(where))


@fuzzing
@given(name=st.sampled_from(BASES), edits=st.lists(file_edits(), min_size=1, max_size=3))
def test_changed_files(name: str, edits: list[FileEdit]) -> None:
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where) / "model"
        shutil.copytree(original(name), folder)
        for edit in edits:
            edit.apply(folder)
        check(Path(where))


@fuzzing
@given(
    name=st.sampled_from(BASES),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8),
)
def test_damaged_bytes(name: str, flips: list[tuple[float, int]]) -> None:
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where) / "model"
        shutil.copytree(original(name), folder)
        path = next(folder.rglob("*.onnx"))
        data = bytearray(path.read_bytes())
        for part, value in flips:
            data[int(part * len(data))] = value
        path.write_bytes(data)
        check(Path(where))
