"""The list of exported models, and the names by which they are found."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edgerun.models.find import (
    BUNDLED_MODEL,
    bundled_folder,
    exported_models,
    exports_folder,
    find_model,
    record_export,
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGERUN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def export(folder: Path) -> Path:
    """A folder with the file by which an exported model is known, in the list."""
    folder.mkdir(parents=True)
    (folder / "model.onnx").touch()
    record_export(folder)
    return folder


def test_an_export_is_found_by_its_name_until_it_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, other = export(tmp_path / "out"), export(tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    record_export(Path("out"))  # again
    assert exported_models() == {"out": out, "other": other}
    monkeypatch.chdir(tmp_path / "home")
    assert find_model("out") == out
    assert find_model(Path("out")) == Path("out")
    Path("out").mkdir()
    assert find_model("out") == Path("out"), "a path that exists is not taken for a name"
    Path("out").rmdir()
    shutil.rmtree(out)
    (other / "model.onnx").unlink()
    assert exported_models() == {}
    assert find_model("out") == Path("out")


def test_the_first_of_several_folders_has_the_name(tmp_path: Path) -> None:
    first, second, bundled = (export(tmp_path / name) for name in ("a/out", "b/out", f"c/{BUNDLED_MODEL}"))
    assert exported_models() == {"out": first, str(second): second, str(bundled): bundled}
    of_app = exports_folder() / "out"
    of_app.mkdir(parents=True)
    (of_app / "model.onnx").touch()
    assert exported_models() == {"out": of_app, **{str(each): each for each in (first, second, bundled)}}
    assert find_model(BUNDLED_MODEL) == bundled_folder()


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"folders": 3}', b'{"folders": [1, "out", null]}', b"\xff", b"[" * 100_000]
)
def test_a_damaged_list_is_empty_and_replaced(tmp_path: Path, home: Path, content: bytes) -> None:
    out = export(tmp_path / "out")
    (home / "exports.json").write_bytes(content)
    assert exported_models() == {}
    record_export(out)
    assert exported_models() == {"out": out}


def test_exports_that_end_at_the_same_time_are_all_listed(tmp_path: Path, home: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(export, [tmp_path / f"out{number}" for number in range(12)]))
    assert set(exported_models().values()) == set(folders)
    if os.name == "posix":
        assert (home / "exports.json").stat().st_mode & 0o077 == 0


def test_a_list_that_cannot_be_written_is_left_out(tmp_path: Path, home: Path) -> None:
    home.write_text("a file", encoding="utf-8")
    export(tmp_path / "out")
    assert exported_models() == {}
