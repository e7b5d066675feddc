"""Runs commands of edge-run in the process of the tests, and records what a terminal is sent."""

from __future__ import annotations

import io
import json
from typing import Any, TypeAlias

import pytest

from edgerun.edge.cli.main import main

Capture: TypeAlias = pytest.CaptureFixture[str]
Patch: TypeAlias = pytest.MonkeyPatch


def output_of(capsys: Capture, *arguments: object) -> str:
    """What a command prints on standard output, which ends with exit code 0."""
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def json_of(capsys: Capture, *arguments: object) -> Any:
    """The JSON that a command prints, which ends with exit code 0."""
    return json.loads(output_of(capsys, *arguments))


def fails(capsys: Capture, *arguments: object) -> str:
    """Run with bad arguments; returns the one line of error on standard error, and checks the exit code."""
    assert main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = [line for line in err.splitlines() if not line.startswith("edge-run: progress: ")]
    assert line.startswith("edge-run: error: ")
    return line.removeprefix("edge-run: error: ")


def standard_input(monkeypatch: Patch, data: bytes | io.RawIOBase) -> None:
    """Let commands read this from standard input."""
    raw = io.BytesIO(data) if isinstance(data, bytes) else io.BufferedReader(data)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(raw, encoding="utf-8"))


class Screen(io.StringIO):
    """A terminal that records what it is sent."""

    def isatty(self) -> bool:
        return True
