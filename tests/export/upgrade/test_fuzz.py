"""Damaged foreign models are upgraded correctly or refused with a one-line error."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgerun.errors import EdgeError
from edgerun.export import FP32, ExportRecipe, upgrade_model
from support.graph_edits import BYTE_CHANGES, FileEdit, change_bytes, edit_graphs, file_edits, graph_edits
from support.layouts import LAYOUTS, write_layout

BASES = ("optimum-external-many", "optimum-merged", "renamed-genai", "genai-float16", "community", "genai-window-cache")


@cache
def original(name: str) -> Path:
    """Write an undamaged layout once."""
    return write_layout(Path(tempfile.mkdtemp(prefix="layout")), LAYOUTS[name])


def edit_files(folder: Path, edits: list[FileEdit]) -> None:
    for edit in edits:
        edit.apply(folder)


DAMAGE = (
    (edit_graphs, st.lists(graph_edits(), min_size=1, max_size=3)),
    (edit_files, st.lists(file_edits(), min_size=1, max_size=3)),
    (change_bytes, BYTE_CHANGES),
)


@pytest.mark.parametrize("examples", [3, pytest.param(40, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("damage", "edits"), DAMAGE, ids=["graph", "files", "bytes"])
def test_damaged_models(damage: Callable[[Path, Any], None], edits: st.SearchStrategy[Any], examples: int) -> None:
    """A bundle that is written has passed the comparison with its source."""

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(name=st.sampled_from(BASES), drawn=edits)
    def upgraded_or_refused(name: str, drawn: Any) -> None:
        with tempfile.TemporaryDirectory() as created:
            where, message = Path(created), None
            shutil.copytree(original(name), where / "model")
            damage(where / "model", drawn)
            try:
                upgrade_model(where / "model", where / "out", ExportRecipe(FP32))
            except EdgeError as error:
                message = str(error)
            assert {path.name for path in where.iterdir()} == ({"model", "out"} if message is None else {"model"})
            assert message is None or (message.strip() and "\n" not in message)

    upgraded_or_refused()
