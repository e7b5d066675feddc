"""`edge-run mcp` from the outside: the official client, lines of a client by hand, cancelling, and the end."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mcp", reason="needs the mcp extra")
pytest.importorskip("onnx", reason="needs the export extra")

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

import edgerun
from edgerun.export import FP32, ExportRecipe
from support.commands import Capture, fails
from support.encoders import write_encoder
from support.processes import EDGE_RUN, started
from support.rerankers import write_reranker
from support.scripted_model import write_calling_bundle
from support.tiny_models import write_bundle

LIMIT_S = 120.0
INITIALIZE = {
    "protocolVersion": "2025-06-18",
    "capabilities": {},
    "clientInfo": {"name": "tests", "version": "1"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A model whose answer is known, one that gives hidden states, and one that can say yes and no."""
    folder = tmp_path_factory.mktemp("models")
    write_reranker(folder / "reranker")
    hidden = write_bundle(folder / "hidden", weights=ExportRecipe(FP32, hidden_states=True))
    scripted = write_calling_bundle(folder / "scripted")
    reranker = folder / "reranker" / "bundle"
    return scripted.rename(folder / "writer"), hidden.rename(folder / "embedder"), reranker.rename(folder / "judge")


class Client:
    """Writes and reads lines by hand."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.send(1, "initialize", INITIALIZE)
        self.first = self.receive()["result"]
        self.send(None, "notifications/initialized")

    def write(self, line: bytes) -> None:
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def send(self, id_: int | None, method: str, params: dict[str, Any] | None = None) -> None:
        message: dict[str, Any] = {"jsonrpc": "2.0", "method": method, "params": params or {}}
        self.write(json.dumps(message if id_ is None else {**message, "id": id_}).encode())

    def call(self, id_: int, tool: str, **arguments: Any) -> None:
        self.send(id_, "tools/call", {"name": tool, "arguments": arguments})

    def receive(self) -> dict[str, Any]:
        """The next line, which has to be a message."""
        message: dict[str, Any] = json.loads(self.process.stdout.readline())
        assert message["jsonrpc"] == "2.0"
        return message

    def end(self) -> list[dict[str, Any]]:
        """Close the input, after which the process has to end well; returns its last messages."""
        self.process.stdin.close()
        assert self.process.wait(LIMIT_S) == 0
        assert self.process.stderr.read() == b""
        return [json.loads(line) for line in self.process.stdout.read().splitlines()]


@contextmanager
def client(*arguments: object) -> Iterator[Client]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started([*EDGE_RUN, "mcp", *map(str, arguments)], **pipes) as process:
        yield Client(process)


def test_the_official_client_finds_and_calls_every_tool(models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    writer, embedder, judge = models
    encoder = write_encoder(tmp_path / "encoder")

    async def talk() -> dict[str, Any]:
        program, *arguments = (*EDGE_RUN, "mcp", *map(str, (*models, encoder)))
        parameters = StdioServerParameters(command=program, args=arguments)
        async with stdio_client(parameters) as streams, ClientSession(*streams) as session:
            first = await session.initialize()
            assert (first.server_info.name, first.server_info.version) == ("edge-run", edgerun.__version__)
            assert first.instructions == "Models: writer, embedder, judge, encoder"
            tools = {tool.name: tool for tool in (await session.list_tools()).tools}
            assert {name: tool.input_schema["required"] for name, tool in tools.items()} == {
                "generate": ["prompt"],
                "embed": ["texts"],
                "rerank": ["query", "documents"],
                "count_tokens": ["text"],
            }
            assert all(tool.description for tool in tools.values())
            calls = {
                "text": ("generate", {"prompt": "Hello", "system": "Be brief.", "temperature": 0}),
                "cut": ("generate", {"prompt": "Hello", "max_tokens": 1}),
                "vectors": ("embed", {"texts": ["one", "the other"], "model": "embedder"}),
                "encoded": ("embed", {"texts": ["one", "the other"], "model": "encoder"}),
                "scores": ("rerank", {"query": "the sea", "documents": ["the sand", "that"], "model": "judge"}),
                "count": ("count_tokens", {"text": "the other"}),
                "no hidden states": ("embed", {"texts": ["one"]}),
                "no model": ("generate", {"prompt": "Hello", "model": "none"}),
                "no number": ("generate", {"prompt": "Hello", "max_tokens": 0}),
                "no text": ("generate", {"prompt": 3, "max_tokens": "many"}),
                "no query": ("rerank", {"documents": []}),
                "no tool": ("dance", {}),
            }
            await session.send_ping()
            return {name: await session.call_tool(*call) for name, call in calls.items()}

    results = asyncio.run(talk())
    with edgerun.load(judge) as judging:
        scores = judging.score("the sea", ["the sand", "that"]).scores
    np.testing.assert_allclose(results["scores"].structured_content["scores"], scores, rtol=0, atol=1e-6)
    with edgerun.load(writer) as written, edgerun.load(embedder) as embedded:
        assert results["text"].content[0].text == written.generate("Hello").text
        assert results["text"].content[0].text.startswith("No functions: ")
        count = {"tokens": len(written.tokenizer.encode("the other", add_special_tokens=False)), "context": 2048}
        vectors = embedded.embed(["one", "the other"])
    with edgerun.load_encoder(encoder) as encoding:
        encoded = encoding.embed(["one", "the other"])
    np.testing.assert_allclose(results["encoded"].structured_content["embeddings"], encoded, rtol=0, atol=1e-6)
    assert results["cut"].content[0].text == "No fun"
    assert results["count"].structured_content == count
    np.testing.assert_allclose(results["vectors"].structured_content["embeddings"], vectors, rtol=0, atol=1e-6)
    said = {name: result.content[0].text for name, result in results.items() if result.is_error}
    assert said.keys() == {"no hidden states", "no model", "no number", "no text", "no query", "no tool"}
    assert said["no hidden states"].startswith("writer does not give hidden states")
    assert said["no model"] == "there is no model 'none'; models are: writer, embedder, judge, encoder"
    assert "max_tokens" in said["no number"].replace("-", "_")
    assert said["no text"].startswith(
        "wrong arguments of generate: prompt: input should be a valid string; max_tokens: "
    )
    assert said["no query"] == "wrong arguments of rerank: query: field required"
    assert said["no tool"] == "Unknown tool: dance"
    assert not any("\n" in text for text in said.values())


def test_only_messages_are_on_standard_output_and_errors_have_the_numbers_of_json_rpc(
    models: tuple[Path, Path, Path],
) -> None:
    with client(models[0]) as connection:
        assert connection.first["protocolVersion"] == "2025-06-18"
        connection.write(b"no JSON")
        connection.write(b"[]")
        connection.send(2, "tools/dance")
        response = connection.receive()
        assert (response["id"], response["error"]["code"]) == (2, -32601)
        connection.send(3, "tools/call", {"arguments": {}})
        response = connection.receive()
        assert (response["id"], response["error"]["code"]) == (3, -32602)
        connection.send(4, "ping")
        assert connection.receive() == {"jsonrpc": "2.0", "id": 4, "result": {}}
        assert connection.end() == []


def test_a_call_is_cancelled_and_others_go_on(endless_bundle: Path) -> None:
    with client(endless_bundle) as connection:
        connection.call(2, "generate", prompt="the")
        connection.call(3, "count_tokens", text="the")
        assert connection.receive()["id"] == 3
        connection.send(None, "notifications/cancelled", {"requestId": 2})
        connection.call(4, "generate", prompt="the", max_tokens=2)  # the engine is free again
        assert connection.receive()["id"] == 4
        connection.call(5, "generate", prompt="the")
        connection.call(6, "count_tokens", text="the")
        assert connection.receive()["id"] == 6
        (last,) = connection.end()  # in the middle of an answer
        assert (last["id"], last["error"]["message"]) == (5, "Connection closed")


def test_without_the_extra_or_a_model_the_command_says_what_is_missing(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "none does not exist" in fails(capsys, "mcp", tmp_path / "none")
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    monkeypatch.delitem(sys.modules, "edgerun.edge.tools.mcp_server", raising=False)
    assert 'the MCP server needs the package mcp; pip install "edge-run[mcp]"' in fails(capsys, "mcp")
    monkeypatch.setattr("sys.stdin", None)
    assert "standard input is closed" in fails(capsys, "mcp")
