"""The folder with the intermediate results of a long export."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgerun.errors import DestinationError, InputError
from edgerun.export.calibration.work_folder import work_folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "cache"))


def interrupted_run(source: Path, settings: str, kept: Path | None = None) -> Path:
    run = work_folder(source, settings, kept)
    folder = run.__enter__()
    (folder / "result").write_text("out")
    interrupt = KeyboardInterrupt()
    assert not run.__exit__(KeyboardInterrupt, interrupt, None)
    return folder


def test_an_interrupted_run_is_resumed(source: Path) -> None:
    left = interrupted_run(source, "4 bits")
    with work_folder(source, "4 bits") as folder:
        assert folder == left
        assert (folder / "result").read_text() == "out"
    assert not left.exists()


@pytest.mark.parametrize("change", ["settings", "time", "size", "file"])
def test_other_settings_have_another_folder(source: Path, change: str) -> None:
    left = interrupted_run(source, "4 bits")
    weights = source / "model.safetensors"
    if change == "time":
        os.utime(weights, ns=(0, 0))
    elif change == "size":
        weights.write_bytes(b"more weights")
    elif change == "file":
        (source / "tokenizer.json").touch()
    with work_folder(source, "2 bits" if change == "settings" else "4 bits") as folder:
        assert folder != left
        assert not (folder / "result").exists()


def test_a_given_folder_is_kept(source: Path, tmp_path: Path) -> None:
    kept = tmp_path / "work"
    with work_folder(source, "4 bits", kept) as folder:
        assert folder == kept
        (folder / "result").touch()
    assert (kept / "result").exists()
    with pytest.raises(InputError, match="holds work on another model, or with other settings"):  # noqa: SIM117
        with work_folder(source, "2 bits", kept):
            pass


def test_a_folder_with_other_files_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "letter.txt").touch()
    with pytest.raises(InputError, match="holds other files"), work_folder(source, "", tmp_path / "work"):
        pass


def test_one_export_at_a_time(source: Path) -> None:
    with work_folder(source, ""), pytest.raises(InputError, match="another export uses"), work_folder(source, ""):
        pass


def test_an_unwritable_folder_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DestinationError, match="file cannot be written"), work_folder(source, "", tmp_path / "file"):
        pass
