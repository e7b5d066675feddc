"""Requests of OpenAI's clients for Python and Node to a running server, against what the engine says."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

import edgerun
from support.openai_clients import Outcome, ask_npm, ask_python, require_npm_package, run, run_node
from support.openai_requests import BUSY_AFTER, CHAT, Request, openai_requests, write_models
from support.serving import Served, served
from support.unusual_files import needs_links

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
KEY = "secret"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def engines(models: list[Path]) -> Iterator[dict[str, edgerun.Engine]]:
    with ExitStack() as loaded:
        yield {path.name: loaded.enter_context(edgerun.load(path, draft=None, threads=1)) for path in models}


@pytest.fixture(scope="module")
def server(models: list[Path]) -> Iterator[Served]:
    queue = ("--parallel", "1", "--max-waiting", str(BUSY_AFTER - 1))
    with served(models, "--draft", "none", "--threads", "1", *queue, EDGERUN_API_KEY=KEY) as server:
        yield server


def check(requests: Sequence[Request], outcomes: Sequence[Outcome]) -> None:
    """Check that every request shows what it must."""
    assert len(requests) == len(outcomes) == 44
    shown = {request.name: request.shown(outcome) for request, outcome in zip(requests, outcomes, strict=True)}
    expected = {request.name: request.expected for request in requests}
    assert shown == expected


def test_the_python_client(server: Served, engines: dict[str, edgerun.Engine]) -> None:
    requests = openai_requests(engines, "Python")
    check(requests, ask_python(f"{server.base}/v1", [request.call for request in requests]))


@needs_links
def test_the_npm_client(server: Served, engines: dict[str, edgerun.Engine], tmp_path: Path) -> None:
    require_npm_package()
    requests = openai_requests(engines, "Node")
    check(requests, ask_npm(f"{server.base}/v1", [request.call for request in requests], tmp_path))


def check_example(printed: bytes, engine: edgerun.Engine) -> None:
    """Check what an example prints: the answers to its conversation, and what was in the prefix cache."""
    messages: list[dict[str, str]] = []
    pattern, prompts = "", []
    for question in ("list all files of this folder", "only hidden ones"):
        messages.append({"role": "user", "content": question})
        reply = engine.generate(messages, temperature=0.0, max_tokens=50)
        messages.append({"role": "assistant", "content": reply.text})
        prompts.append(reply.stats.prompt_tokens)
        pattern += f"{re.escape(reply.text)}\n\\((\\d+) of {prompts[-1]} tokens were cached\\)\n"
    found = re.fullmatch(pattern, printed.decode())
    assert found is not None, printed
    assert prompts[0] <= int(found[2]) < prompts[1]


def test_the_python_example(server: Served, engines: dict[str, edgerun.Engine]) -> None:
    environment = {"OPENAI_BASE_URL": f"{server.base}/v1", "OPENAI_API_KEY": KEY, "PYTHONUTF8": "1"}
    check_example(run([sys.executable, str(EXAMPLES / "openai_client.py")], **environment), engines[CHAT])


@needs_links
def test_the_npm_example(server: Served, engines: dict[str, edgerun.Engine], tmp_path: Path) -> None:
    environment = {"OPENAI_BASE_URL": f"{server.base}/v1", "OPENAI_API_KEY": KEY}
    check_example(run_node(EXAMPLES / "openai_client.mjs", tmp_path, **environment), engines[CHAT])
