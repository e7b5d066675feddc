"""What is exported where a source is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgerun import InputError
from edgerun.export import find_source


def test_a_folder_with_one_gguf_file_means_that_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    (tmp_path / "README.md").touch()
    assert find_source(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(InputError, match=r"holds several GGUF files: a\.gguf, b\.gguf; give one of them"):
        find_source(tmp_path)


def test_of_a_split_model_the_first_part_is_meant(tmp_path: Path) -> None:
    for part in (1, 2, 3):
        (tmp_path / f"m-0000{part}-of-00003.gguf").touch()
    assert find_source(tmp_path) == tmp_path / "m-00001-of-00003.gguf"


def test_a_checkpoint_stays_one_whatever_lies_beside_it(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "a.gguf"):
        (tmp_path / name).touch()
    assert find_source(tmp_path) == tmp_path


def test_what_is_not_there_or_no_model_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing does not exist; give a checkpoint folder"):
        find_source(tmp_path / "nothing")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InputError, match=r"notes\.txt is not a model; give a checkpoint folder"):
        find_source(tmp_path / "notes.txt")
