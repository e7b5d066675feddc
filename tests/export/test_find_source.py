"""Finding the model to export in a named file or folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgerun import InputError
from edgerun.export import find_source


def test_a_folder_stands_for_its_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    (tmp_path / "README.md").touch()
    assert find_source(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(InputError, match=r"holds several GGUF files: a\.gguf, b\.gguf; give one of them"):
        find_source(tmp_path)
    (tmp_path / "b.gguf").rename(tmp_path / "a-mmproj-F16.gguf")  # the vision tower of the model beside it
    assert find_source(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "split").mkdir()
    for part in (1, 2, 3):
        (tmp_path / "split" / f"m-0000{part}-of-00003.gguf").touch()
    assert find_source(tmp_path / "split") == tmp_path / "split" / "m-00001-of-00003.gguf"
    for name in ("config.json", "model.safetensors"):  # a checkpoint folder may contain other files
        (tmp_path / name).touch()
    assert find_source(tmp_path) == tmp_path


def test_other_paths_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").touch()
    for path, message in {
        "Qwen2.5-0.5B-Instruct": r"B-Instruct does not exist; .*org/Qwen2\.5-0\.5B-Instruct; else",
        "model.gguf": "does not exist; give a checkpoint folder",
        "folder/model": "does not exist; give a checkpoint folder",
        str(tmp_path / "nothing"): "nothing does not exist; give a checkpoint folder",
        "notes.txt": r"notes\.txt is not a model; give a checkpoint folder",
    }.items():
        with pytest.raises(InputError, match=message):
            find_source(Path(path))
