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


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ([f"m-0000{part}-of-00003.gguf" for part in (1, 2, 3)], "m-00001-of-00003.gguf"),
        (["config.json", "model.safetensors", "a.gguf"], ""),
    ],
    ids=["split", "checkpoint"],
)
def test_a_folder_with_several_files(files: list[str], found: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert find_source(tmp_path) == tmp_path / found


def test_a_name_without_an_organization_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"B-Instruct does not exist; .*org/Qwen2\.5-0\.5B-Instruct; else"):
        find_source(Path("Qwen2.5-0.5B-Instruct"))
    for path in ("model.gguf", "folder/model"):
        with pytest.raises(InputError, match=r"does not exist; give a checkpoint folder"):
            find_source(Path(path))


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InputError, match=r"notes\.txt is not a model; give a checkpoint folder"):
        find_source(tmp_path / "notes.txt")
