"""The command line where files never end, are huge, or come from Windows: one line of error, or the same answer."""

from __future__ import annotations

import io
import os
import shutil
import sys
from pathlib import Path

import pytest

import edgerun
from edgerun.models import graph_files
from support.commands import Capture, Patch, fails, json_of, output_of, standard_input
from support.tiny_models import write_checkpoint
from support.unusual_files import needs_pipes, replace_by_pipe, replace_by_sparse_file


@needs_pipes
@pytest.mark.parametrize(
    "arguments",
    [
        ("export", "PIPE.gguf", "OUT"),
        ("export", "CHECKPOINT", "OUT", "--plan", "PIPE"),
        ("export", "CHECKPOINT", "OUT", "--calibration", "PIPE", "--method", "gptq"),
        ("BUNDLE", "-p", "a", "--tokenizer", "PIPE"),
        ("BUNDLE", "-p", "a", "--resume", "PIPE"),
        ("PIPE.onnx", "-p", "a"),
        ("tune", "BUNDLE", "--text", "PIPE"),
        ("bench", "BUNDLE", "--prompts", "PIPE"),
        ("bench", "BUNDLE", "--replay", "PIPE"),
        ("verify", "BUNDLE", "--prompts", "PIPE"),
    ],
    ids=" ".join,
)
def test_a_pipe_in_the_place_of_a_file_is_refused(
    tiny_bundle: Path, tmp_path: Path, capsys: Capture, arguments: tuple[str, ...]
) -> None:
    places = {"BUNDLE": tiny_bundle, "CHECKPOINT": tmp_path / "checkpoint", "OUT": tmp_path / "out"}
    if "CHECKPOINT" in arguments:
        write_checkpoint(tmp_path / "checkpoint")
    for name in ("PIPE", "PIPE.gguf", "PIPE.onnx"):
        places[name] = replace_by_pipe(tmp_path / name)
    err = fails(capsys, *(places.get(each, each) for each in arguments))
    assert "not a regular file" in err or "is not an .onnx file" in err or "is not a model" in err


@needs_pipes
def test_a_process_substitution_of_the_shell_is_read(tiny_bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    text = b"the other\n\na list\n"
    (tmp_path / "prompts.txt").write_bytes(text)
    reading, writing = os.pipe()
    os.write(writing, text)
    os.close(writing)
    try:
        first, second = (
            json_of(capsys, "verify", tiny_bundle, "--prompts", path, "-n", "2", "--json")["greedy"]
            for path in (tmp_path / "prompts.txt", f"/dev/fd/{reading}")
        )
    finally:
        os.close(reading)
    assert first == second


@needs_pipes
def test_pipes_in_the_cache_are_passed_over(
    tiny_bundle: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path))
    expected = output_of(capsys, tiny_bundle, "-p", "the other", "-n", "12")
    measured = [path for path in tmp_path.rglob("*.json") if path.is_file()]
    assert measured
    for path in measured:
        replace_by_pipe(path)
    assert output_of(capsys, tiny_bundle, "-p", "the other", "-n", "12") == expected


@pytest.mark.parametrize("name", ["edge.json", "config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_huge_file_of_a_model_is_refused_by_its_size(
    tiny_bundle: Path, tmp_path: Path, capsys: Capture, name: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_bundle, folder)
    if name != "edge.json":
        (folder / "edge.json").unlink()
    replace_by_sparse_file(folder / name, 8 << 30)
    err = fails(capsys, folder, "-p", "a")
    assert f"{name} cannot be read: it has 8589934592 bytes" in err


def test_a_folder_with_very_many_files_is_searched_for_a_graph_above_them_only(
    tiny_bundle: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(graph_files, "_MAX_ENTRIES", 100)
    for folder in range(10):
        (tmp_path / "files" / str(folder)).mkdir(parents=True)
        for file in range(10):
            (tmp_path / "files" / str(folder) / str(file)).touch()
    assert "holds over 100 files and folders; give the model's own folder" in fails(capsys, tmp_path, "-p", "a")
    assert "holds over 100 files" in fails(capsys, "export", tmp_path, tmp_path / "out")
    shutil.copytree(tiny_bundle, tmp_path, dirs_exist_ok=True)
    with edgerun.load(tmp_path) as engine:
        assert engine.generate("the", max_tokens=2).text


@pytest.mark.parametrize("data", [b"the other\r\nand\r\n", b"\xef\xbb\xbfthe other\nand\n"])
def test_a_piped_prompt_from_windows_is_the_same_prompt(
    tiny_bundle: Path, capsys: Capture, monkeypatch: Patch, data: bytes
) -> None:
    answers = []
    for given in (b"the other\nand", data):
        standard_input(monkeypatch, given)
        answers.append(output_of(capsys, tiny_bundle, "-n", "6", "--raw"))
    assert answers[0] == answers[1]


def test_a_piped_prompt_without_end_is_refused(tiny_bundle: Path, capsys: Capture, monkeypatch: Patch) -> None:
    class Endless(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
            buffer[:] = b"y" * len(buffer)
            return len(buffer)

    standard_input(monkeypatch, Endless())
    assert "standard input has more than 16777216 bytes" in fails(capsys, tiny_bundle)


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
@pytest.mark.parametrize("name", ["model.gguf", "model.onnx", "model"])
def test_links_that_lead_to_each_other_are_refused(tmp_path: Path, capsys: Capture, name: str) -> None:
    (tmp_path / name).symlink_to(name)
    assert "does not exist" in fails(capsys, "export", tmp_path / name, tmp_path / "out")
    assert "does not exist" in fails(capsys, tmp_path / name, "-p", "a")


@pytest.mark.parametrize("option", ["--tokenizer", "--draft"])
def test_the_home_of_an_unknown_user_is_refused(tiny_bundle: Path, capsys: Capture, option: str) -> None:
    err = fails(capsys, tiny_bundle, "-p", "a", option, "~nobody-has-this-name/x")
    assert "~nobody-has-this-name/x does not exist" in err
