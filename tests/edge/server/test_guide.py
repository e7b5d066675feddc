"""The examples of docs/server.md work as they are written."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.commands import Capture
from support.serving import PATIENCE_S, Served, served

GUIDE = (Path(__file__).resolve().parents[3] / "docs" / "server.md").read_text(encoding="utf-8")
WRITTEN = "http://127.0.0.1:8080"
CURL = re.findall(r"```sh\n(curl .*?)```", GUIDE, re.DOTALL)
CLIENTS = re.findall(r"```python\n((?:from openai|import ollama|import anthropic)\b.*?)```", GUIDE, re.DOTALL)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served([]) as server:
        yield server


@pytest.mark.skipif(os.name == "nt" or shutil.which("curl") is None, reason="needs a POSIX shell and curl")
@pytest.mark.parametrize("command", CURL, ids=[command.split()[1 + command.startswith("curl -N")] for command in CURL])
def test_curl_lines(server: Served, command: str) -> None:
    assert WRITTEN in command
    done = subprocess.run(
        ["sh", "-c", command.replace(WRITTEN, server.base)],
        capture_output=True,
        check=True,
        timeout=PATIENCE_S,
        env={**os.environ, "EDGERUN_API_KEY": "k"},
    )
    text = done.stdout.decode()
    if "-N" in command:
        assert text.endswith("data: [DONE]\n\n")
        assert '"usage":{' in text
    else:
        assert "error" not in json.loads(text) or json.loads(text)["error"] is None


def test_there_are_as_many_curl_lines_as_the_guide_has() -> None:
    assert len(CURL) == GUIDE.count("curl http") + GUIDE.count("curl -N http") > 6


@pytest.mark.parametrize("client", CLIENTS, ids=[client.split()[1] for client in CLIENTS])
def test_the_python_clients(server: Served, client: str, capsys: Capture) -> None:
    names: dict[str, Any] = {}
    exec(client.replace(WRITTEN, server.base), names)  # noqa: S102  the guide's own example
    names["client"].close()
    assert capsys.readouterr().out


def test_the_application_of_the_guide_is_made_as_written(tiny_bundle: Path) -> None:
    (program,) = re.findall(r"```python\n(import edgerun.server.*?)```", GUIDE, re.DOTALL)
    names: dict[str, object] = {}
    exec(program.replace('"my-model"', repr(str(tiny_bundle))), names)  # noqa: S102  the guide's own example
    assert "app" in names
