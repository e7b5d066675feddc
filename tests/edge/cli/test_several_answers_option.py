"""`--n` and `--best-of`: several answers to one prompt, as text and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgerun
from edgerun.edge.cli.main import main
from support.commands import Capture, fails

PROMPT = "the other thing"
SAMPLING = ("-n", "8", "-t", "1", "--seed", "7")


@pytest.fixture(scope="module")
def alone(tiny_bundle: Path) -> Iterator[list[edgerun.Reply]]:
    """The answers of single requests with the seeds 7 to 12."""
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0, "logprobs": 0}
    with edgerun.load(tiny_bundle, threads=1, cache=False) as engine:
        yield [engine.generate(PROMPT, seed=7 + index, **options) for index in range(6)]


def printed(capsys: Capture, *arguments: object) -> tuple[str, str]:
    assert main([*map(str, arguments), "-p", PROMPT, *SAMPLING]) == 0
    out, err = capsys.readouterr()
    return out, err


def test_several_answers_have_headings(tiny_bundle: Path, alone: list[edgerun.Reply], capsys: Capture) -> None:
    out, err = printed(capsys, tiny_bundle, "--n", 3, "--stats")
    texts = [reply.text if reply.text.endswith("\n") else f"{reply.text}\n" for reply in alone[:3]]
    assert out == "\n".join(f"Answer {number} of 3:\n{text}" for number, text in enumerate(texts, 1))
    assert [line.split(":")[0] for line in err.splitlines()] == ["answer 1", "answer 2", "answer 3"]


def test_the_best_answers_are_printed_first(tiny_bundle: Path, alone: list[edgerun.Reply], capsys: Capture) -> None:
    best = max(alone, key=lambda reply: reply.stats.mean_logprob or -99)
    out, err = printed(capsys, tiny_bundle, "--best-of", 6, "--early-stop", 1, "--stats")
    assert out.removesuffix("\n") == best.text.removesuffix("\n")
    assert f"mean log-probability {best.stats.mean_logprob:.3f}" in err
    assert re.search(r"^best of 6 answers, \d stopped early.*, \d+ tokens of answers that are not shown$", err, re.M)


def test_several_answers_as_json(tiny_bundle: Path, alone: list[edgerun.Reply], capsys: Capture) -> None:
    out, _ = printed(capsys, tiny_bundle, "--answers", 2, "--best-of", 6, "--json-stream", "--logprobs", 0)
    *pieces, found = map(json.loads, out.splitlines())
    best = sorted(alone, key=lambda reply: -(reply.stats.mean_logprob or 0))[:2]
    assert [choice["text"] for choice in found["choices"]] == [reply.text for reply in best]
    for index, choice in enumerate(found["choices"]):
        assert "".join(piece["delta"] for piece in pieces if piece["index"] == index) == choice["text"]
        found_bytes = bytes(byte for token in choice["logprobs"] for byte in token["bytes"])
        assert found_bytes.decode("utf-8", "replace") == choice["text"]
    first = found["choices"][0]
    assert {name: found[name] for name in first} == first
    candidates = found["best_of"]["candidates"]
    assert [each["seed"] for each in candidates] == list(range(7, 13))
    assert [each["mean_logprob"] for each in candidates if each["choice"] == 0] == [first["mean_logprob"]]
    assert found["best_of"]["stopped"] == sum(each["finish_reason"] is None for each in candidates)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--n", "0"], "n is 0; it must be between 1 and 128"),
        (["--n", "-3"], "n is -3; it must be between 1 and 128"),
        (["--n", "200"], "n is 200; it must be between 1 and 128"),
        (["--best-of", "0"], "best_of is 0; it must be between 1 (n) and 128"),
        (["--n", "3", "--best-of", "2"], "best_of is 2; it must be between 3 (n) and 128"),
        (["--best-of", "3", "--early-stop", "0.1"], "early_stop is 0.1; it must be between 0.5 and 1"),
    ],
    ids=" ".join,
)
def test_impossible_numbers_of_answers(tiny_bundle: Path, arguments: list[str], message: str, capsys: Capture) -> None:
    assert message in fails(capsys, tiny_bundle, "-p", PROMPT, *arguments)
