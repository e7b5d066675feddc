"""`edge-run complete` fills the gap between two files."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("support.tiny_models", reason="needs the export extra")

import edgerun
from support.commands import Capture, Patch, fails, json_of, output_of, standard_input
from support.infill_models import SUGGESTION, write_infill_bundle, write_suggesting_bundle

BEFORE, AFTER, OTHER = "the sea \n\n", "\n and the sand\n", "then\n"


@pytest.fixture(scope="module")
def suggesting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_suggesting_bundle(tmp_path_factory.mktemp("suggesting"))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_infill_bundle(tmp_path_factory.mktemp("infill"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {"before.txt": BEFORE, "after.txt": AFTER, "other.txt": OTHER, "empty.txt": ""}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_the_text_between_two_files_is_printed(suggesting: Path, folder: Path, capsys: Capture) -> None:
    files = ["--prefix-file", folder / "before.txt", "--suffix-file", folder / "after.txt"]
    assert output_of(capsys, "complete", suggesting, *files) == "".join(SUGGESTION)
    assert output_of(capsys, "complete", suggesting, *files, "-n", 2) == f"{''.join(SUGGESTION[:2])}\n"


def test_several_suggestions_are_those_of_the_engine(bundle: Path, folder: Path, capsys: Capture) -> None:
    files = ["--prefix-file", folder / "before.txt", "--suffix-file", folder / "after.txt"]
    extra = ["--extra-file", folder / "other.txt"]
    found = json_of(capsys, "complete", bundle, *files, *extra, "-k", 3, "-n", 9, "--least-confidence", 0.01, "--json")
    others = [{"filename": "other.txt", "text": OTHER}]
    with edgerun.load(bundle) as engine:
        reply = engine.complete(
            BEFORE, AFTER, 3, max_tokens=9, least_confidence=0.01, extra=others, document="before.txt"
        )
    assert [each["text"] for each in found["choices"]] == [choice.text for choice in reply.choices]
    assert [each["mean_logprob"] for each in found["choices"]] == pytest.approx(
        [choice.stats.mean_logprob for choice in reply.choices]
    )


def test_a_text_of_standard_input_keeps_its_line_ends(
    bundle: Path, folder: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    expected = json_of(capsys, "complete", bundle, "--prefix-file", folder / "before.txt", "-n", 3, "--json")
    standard_input(monkeypatch, BEFORE.encode())
    assert json_of(capsys, "complete", bundle, "-n", 3, "--json")["usage"] == expected["usage"]
    standard_input(monkeypatch, AFTER.encode())
    files = ["--prefix-file", folder / "empty.txt", "--suffix-file", "-"]
    assert json_of(capsys, "complete", bundle, *files, "-n", 3, "--json")["usage"]["prompt_tokens"] > len(AFTER) // 4


def test_the_model_is_told_no_name_of_standard_input(
    bundle: Path, folder: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    standard_input(monkeypatch, BEFORE.encode())
    found = json_of(capsys, "complete", bundle, "--extra-file", folder / "after.txt", "-n", 1, "--json")
    with edgerun.load(bundle) as engine:
        extra = [{"filename": "after.txt", "text": AFTER}]
        expected = engine.count_tokens(BEFORE, edgerun.GenerateOptions(suffix="", extra=extra))
    assert found["usage"]["prompt_tokens"] == expected


def test_what_is_wrong_is_said_in_one_line(tiny_bundle: Path, bundle: Path, folder: Path, capsys: Capture) -> None:
    before = ["--prefix-file", folder / "before.txt"]
    assert "the model has no tokens for filling in the middle" in fails(capsys, "complete", tiny_bundle, *before)
    for option in ("--suffix-file", "--extra-file"):
        assert "- is given twice; give each text once" in fails(capsys, "complete", bundle, option, "-")
    assert "missing.txt cannot be read" in fails(capsys, "complete", bundle, "--prefix-file", folder / "missing.txt")
    assert "least_confidence is 2.0" in fails(capsys, "complete", bundle, *before, "--least-confidence", 2)
