"""Damaged foreign models are upgraded correctly or refused with a one-line error."""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgerun.errors import EdgeError
from edgerun.export import FP32, ExportRecipe, upgrade_model
from support.folder_edits import FileEdit, file_edits
from support.graph_edits import GraphEdit, graph_edits
from support.layouts import LAYOUTS, write_layout

BASES = ("optimum-external-many", "optimum-merged", "renamed-genai", "genai-float16", "community", "genai-window-cache")
few = settings(max_examples=3, suppress_health_check=list(HealthCheck))
many = settings(max_examples=40, suppress_health_check=list(HealthCheck))


@cache
def original(name: str) -> Path:
    """Write an undamaged layout once."""
    return write_layout(Path(tempfile.mkdtemp(prefix="layout")), LAYOUTS[name])


def check(where: Path) -> None:
    """Upgrade the model in `where`/model. A bundle that is written has passed the comparison with its source."""
    message = None
    try:
        upgrade_model(where / "model", where / "out", ExportRecipe(FP32))
    except EdgeError as error:
        message = str(error)
    assert {path.name for path in where.iterdir()} == ({"model", "out"} if message is None else {"model"})
    assert message is None or (message.strip() and "\n" not in message)


def edit_graph(name: str, edits: list[GraphEdit]) -> None:
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where) / "model"
        shutil.copytree(original(name), folder)
        for path in folder.rglob("*.onnx"):
            model = onnx.load(path, load_external_data=False)
            for edit in edits:
                edit.apply(model)
            path.write_bytes(model.SerializeToString())
        check(Path(where))


def edit_files(name: str, edits: list[FileEdit]) -> None:
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where) / "model"
        shutil.copytree(original(name), folder)
        for edit in edits:
            edit.apply(folder)
        check(Path(where))


def damage_bytes(name: str, flips: list[tuple[float, int]]) -> None:
    """Replace bytes of the graph, each given by its relative position and new value."""
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where) / "model"
        shutil.copytree(original(name), folder)
        path = next(folder.rglob("*.onnx"))
        data = bytearray(path.read_bytes())
        for part, value in flips:
            data[int(part * len(data))] = value
        path.write_bytes(data)
        check(Path(where))


names = st.sampled_from(BASES)
lists_of_graph_edits = st.lists(graph_edits(), min_size=1, max_size=3)
lists_of_file_edits = st.lists(file_edits(), min_size=1, max_size=3)
lists_of_flips = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8)


@few
@given(name=names, edits=lists_of_graph_edits)
def test_few_changed_graphs(name: str, edits: list[GraphEdit]) -> None:
    edit_graph(name, edits)


@few
@given(name=names, edits=lists_of_file_edits)
def test_few_changed_files(name: str, edits: list[FileEdit]) -> None:
    edit_files(name, edits)


@few
@given(name=names, flips=lists_of_flips)
def test_few_damaged_bytes(name: str, flips: list[tuple[float, int]]) -> None:
    damage_bytes(name, flips)


@pytest.mark.nightly
@many
@given(name=names, edits=lists_of_graph_edits)
def test_changed_graphs(name: str, edits: list[GraphEdit]) -> None:
    edit_graph(name, edits)


@pytest.mark.nightly
@many
@given(name=names, edits=lists_of_file_edits)
def test_changed_files(name: str, edits: list[FileEdit]) -> None:
    edit_files(name, edits)


@pytest.mark.nightly
@many
@given(name=names, flips=lists_of_flips)
def test_damaged_bytes(name: str, flips: list[tuple[float, int]]) -> None:
    damage_bytes(name, flips)
