"""Finding the model to export in a named file or folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgerun import InputError
from edgerun.export import find_source


def test_a_folder_with_one_gguf_file_stands_for_that_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    (tmp_path / "README.md").touch()
    assert find_source(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(InputError, match=r"holds several GGUF files: a\.gguf, b\.gguf; give one of them"):
        find_source(tmp_path)


def test_a_folder_with_a_split_model_stands_for_its_first_part(tmp_path: Path) -> None:
    for part in (1, 2, 3):
        (tmp_path / f"m-0000{part}-of-00003.gguf").touch()
    assert find_source(tmp_path) == tmp_path / "m-00001-of-00003.gguf"


def test_a_checkpoint_folder_may_contain_other_files(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "a.gguf"):
        (tmp_path / name).touch()
    assert find_source(tmp_path) == tmp_path


def test_a_name_without_an_organization_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"B-Instruct does not exist; .*org/Qwen2\.5-0\.5B-Instruct; else"):
        find_source(Path("Qwen2.5-0.5B-Instruct"))
    for path in ("model.gguf", "folder/model"):
        with pytest.raises(InputError, match=r"does not exist; give a checkpoint folder"):
            find_source(Path(path))


def test_missing_files_and_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing does not exist; give a checkpoint folder"):
        find_source(tmp_path / "nothing")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InputError, match=r"notes\.txt is not a model; give a checkpoint folder"):
        find_source(tmp_path / "notes.txt")
