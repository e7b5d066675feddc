"""Retired words: source, help texts, messages and documents use the terms of docs/glossary.md."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from edgerun.edge.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
IS_NO = r"(?<!there )\b(?:is|are) no (?!longer|more|less|larger|smaller|cheaper|faster|slower|better|worse)"
"""`a head of 3 is no number`; write `must be a positive number, not 3`."""
RETIRED = {
    r"guess(?:es|ed|ing)?": "draft token, candidate",
    r"laws?": "distribution",
    r"workshop": "drafter pool",
    r"workbench(?:es)?": "runtime/measure",
    r"stopwatch(?:es)?": "timing",
    r"landed": "done, finished",
    r"laid to rest": "disabled, backoff",
    r"certificates?": "exactness report",
    r"verdicts?": "result",
    r"foresight|foreseen": "oracle",
    r"choosers?": "sampler",
    r"acquitted": "within tolerance",
    r"ladders?": "format candidates",
    r"companions?": "tokenizer and config files, separate draft",
}
"""By pattern, what to write instead."""
PATTERN = re.compile(rf'{IS_NO}|"""Of |(?<![a-z])(?:{"|".join(RETIRED)})(?![a-z])', re.IGNORECASE)
"""Also what docstrings do not begin with."""
SUFFIXES = (".py", ".md", ".toml", ".jinja")
EXCEPT = ("tests/test_words.py", "training/everyday.py", "models/bundled/shell-helper/")
"""This list itself, and what models are trained on or read."""
COMMANDS = (
    "mcp",
    *("run", "export", "bench", "verify", "tune", "inspect", "devices", "pull", "models", "rpc", "serve", "app"),
    *("complete", "train-draft", "ps", "stop", "doctor", "control-vector"),
)


def tracked() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=True).stdout.split("\n")
    kept = [name for name in names if name.endswith(SUFFIXES) and not name.startswith(EXCEPT)]
    return [ROOT / name for name in kept if (ROOT / name).is_file()]


def words_of(text: str) -> str:
    """The text with the words of identifiers apart: `GuessTree` and `guess_tree` read `Guess Tree` and `guess tree`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text).replace("_", " ")


def test_the_pattern_finds_what_it_should() -> None:
    for text in (
        "it is no number",
        "a guess",
        "guessed_tokens",
        "GuessTree",
        '    """Of a model',
        "a law of tokens",
        "Laid to rest",
        "ladder",
    ):
        assert PATTERN.search(words_of(text)), text
    for text in ("there is no model", "it is no longer kept", "lawn", "outlaw", "islanded", "claws"):
        assert not PATTERN.search(words_of(text)), text


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="reads the files that git tracks")
def test_no_file_uses_a_retired_word() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match.group(0)!r}"
        for path in tracked()
        for number, line in enumerate(words_of(path.read_text(encoding="utf-8")).split("\n"), 1)
        for match in PATTERN.finditer(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_help_text_uses_a_retired_word(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([command, "--help"])
    assert PATTERN.findall(capsys.readouterr().out) == []
