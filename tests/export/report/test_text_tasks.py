"""Questions about a user's text: what they ask, how they are counted, and their place in a report."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import edgerun
from edgerun.export.report.text_tasks import TaskFigures, questions_about, read_task_text, wilson
from edgerun.runtime.engine import Engine
from support.commands import Capture, fails, output_of
from support.tiny_models import WORDS, write_checkpoint

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source") / "checkpoint")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    words = np.random.default_rng(0).choice(WORDS, 600)
    file = tmp_path / "own.txt"
    file.write_text(" ".join(words), encoding="utf-8")
    return file


@pytest.fixture
def engine(checkpoint: Path, tmp_path: Path, capsys: Capture) -> Engine:
    output_of(capsys, "export", checkpoint, tmp_path / "float", "--weights", "fp32")
    with edgerun.load(tmp_path / "float") as loaded:
        yield loaded


def test_the_first_choice_is_the_right_one(text: Path, engine: Engine) -> None:
    words = read_task_text(text)
    questions = questions_about(words, engine, 0)
    retrieval, copying, arithmetic, continuing = questions.values()
    for prompt, choices in retrieval:
        asked = re.search(r"The number of (\w+) is$", prompt)
        assert asked is not None
        assert f"The number of {asked[1]} is{choices[0]}." in prompt
        assert all(f" is{choice}." in prompt for choice in choices)
    for prompt, choices in copying:
        once, again = prompt.split("\n")
        assert f"{again}{choices[0]}" in once
        assert all(choice.strip() in once for choice in choices)
    for prompt, choices in arithmetic:
        first, second = re.findall(r"\d+", prompt)[-2:]
        assert int(first) + int(second) == int(choices[0])
    for prompt, choices in continuing:
        assert f"{prompt}{choices[0]}" in " ".join(words)
    for each in questions.values():
        assert all(len(set(choices)) == 4 for _, choices in each)
        assert len(set(each)) > 30
    assert questions_about(words, engine, 0) == questions
    assert questions_about(words, engine, 1) != questions


def test_intervals_are_those_of_wilson() -> None:
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 40) == pytest.approx((0, 0.0876), abs=1e-4)
    assert wilson(40, 40) == pytest.approx((0.9124, 1), abs=1e-4)
    assert TaskFigures("copying", 40, 30, 39, 31).is_worse
    assert not TaskFigures("copying", 40, 38, 39, 39).is_worse


@pytest.mark.parametrize("weights", ["fp32", "int2"])
def test_a_report_compares_answers_with_the_float_model(
    checkpoint: Path, text: Path, tmp_path: Path, capsys: Capture, weights: str
) -> None:
    options = ["--weights", weights, "--eval", text, "--calibration-tokens", "1100"]
    shown = output_of(capsys, "export", checkpoint, tmp_path / "out", *options)
    (health,) = re.findall(r"health: (\S+)% of the float32 model's answers \(95 % interval \S+ to \S+; worse at", shown)
    tasks = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))["tasks"]
    assert [each["name"].split()[0] for each in tasks] == ["retrieval", "copying", "arithmetic", "continuing"]
    assert float(health) == pytest.approx(100 * sum(each["same"] for each in tasks) / 160, abs=0.05)
    assert (float(health) == 100) == (weights == "fp32")
    assert all((each["right"] == each["float_right"]) or weights != "fp32" for each in tasks)
    assert "Questions about your text" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.name == "model.onnx"]


def test_texts_without_questions_are_refused_before_anything_is_measured(
    checkpoint: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "short.txt").write_text("the sea and the sand", encoding="utf-8")
    for name, message in (("short.txt", "has 5 words, too few for questions"), ("none.txt", "cannot be read")):
        error = fails(capsys, "export", checkpoint, tmp_path / "out", "--eval", tmp_path / name)
        assert message in error
        assert not (tmp_path / "out").exists()
