"""A client of `edge-run rpc` for tests: a real process, whose every message is compared with the published schema."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from support.processes import EDGE_RUN, started

LIMIT_S = 120.0
SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "rpc-schema.json"


@cache
def schema() -> dict[str, Any]:
    """The published schema."""
    loaded: dict[str, Any] = json.loads(SCHEMA.read_text(encoding="utf-8"))
    return loaded


@cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    """Validates against one of the schema's definitions."""
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": schema()["$defs"]})


class RpcFailedError(Exception):
    """The response to a request is an error."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error["message"])
        self.number: int = error["code"]
        self.code: str = error["data"]["code"]
        self.param: str | None = error["data"]["param"]
        self.hint: str | None = error["data"]["hint"]


class RpcClient:
    """One connection. Messages are read in a thread, so that a test can wait for one with a limit."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.input = process.stdin
        self.output = process.stdout
        self.messages: list[dict[str, Any]] = []
        """All that was received."""
        self._arrived: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._responses: dict[Any, dict[str, Any]] = {}
        self._methods: dict[Any, str] = {}
        self._next_id = 1
        self._reader: threading.Thread | None = None

    def read(self) -> RpcClient:
        """Begin to read what the process writes."""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def write(self, line: bytes) -> None:
        """Write a line as it is."""
        self.input.write(line + b"\n")
        self.input.flush()

    def send(self, method: str, params: dict[str, Any] | None = None, *, id_: Any = None) -> Any:
        """Send a request, and return its id."""
        if id_ is None:
            id_, self._next_id = self._next_id, self._next_id + 1
        self._methods[id_] = method
        self._write_valid({"jsonrpc": "2.0", "id": id_, "method": method, "params": params or {}})
        return id_

    def tell(self, method: str, params: dict[str, Any]) -> None:
        """Send a notification."""
        self._write_valid({"jsonrpc": "2.0", "method": method, "params": params})

    def result(self, id_: Any) -> dict[str, Any]:
        """Wait for the response to a request; what else arrives meanwhile is kept in `messages`.

        Raises:
            RpcFailedError: the response is an error.
        """
        while id_ not in self._responses:
            self.receive()
        response = self._responses.pop(id_)
        if "error" in response:
            raise RpcFailedError(response["error"])
        if id_ in self._methods:
            name = schema()["methods"][self._methods[id_]]["result"]["$ref"].rpartition("/")[2]
            validator(name).validate(response["result"])
        result: dict[str, Any] = response["result"]
        return result

    def failed(self, id_: Any) -> RpcFailedError:
        """Wait for the response to a request, which is an error, and return it."""
        with pytest.raises(RpcFailedError) as caught:
            self.result(id_)
        return caught.value

    def refused(self, method: str, params: dict[str, Any] | None = None) -> RpcFailedError:
        """Send a request and wait for its error."""
        return self.failed(self.send(method, params))

    def call(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a request and wait for its result."""
        return self.result(self.send(method, params))

    def error(self) -> RpcFailedError:
        """Wait for an error that belongs to no request, and return it."""
        while None not in self._responses:
            self.receive()
        return RpcFailedError(self._responses.pop(None)["error"])

    def receive(self) -> dict[str, Any]:
        """Wait for the next message."""
        message = self._arrived.get(timeout=LIMIT_S)
        assert message is not None, f"the process ended, or wrote something else than JSON, after {self.messages[-3:]}"
        self.messages.append(message)
        validator("ServerMessage").validate(message)
        if "method" not in message:
            assert message["id"] not in self._responses, message
            self._responses[message["id"]] = message
        return message

    def forget_responses(self) -> None:
        """Take no notice of responses that nobody waits for."""
        self._responses.clear()

    def until_update(self, id_: Any) -> None:
        """Wait for the first piece of an answer."""
        while True:
            message = self.receive()
            if message.get("method", "").endswith("/update") and message["params"]["request_id"] == id_:
                return

    def initialize(self) -> dict[str, Any]:
        """Begin the conversation."""
        return self.call("initialize", {"protocol_version": 1, "client_info": {"name": "tests"}})

    def text(self, prompt: str = "ab", **options: Any) -> str:
        """The answer to a prompt, without sampling."""
        messages = [{"role": "user", "content": prompt}]
        result = self.call("generate", {"messages": messages, "temperature": 0, **options})
        content: str = result["choices"][0]["message"]["content"]
        return content

    def end(self) -> tuple[int, str]:
        """Close the input; return the exit code and what was written on standard error."""
        self.input.close()
        code = self.process.wait(LIMIT_S)
        if self._reader is not None:
            self._reader.join(LIMIT_S)
            while (message := self._arrived.get(timeout=LIMIT_S)) is not None:
                self.messages.append(message)
        return code, self.process.stderr.read().decode()

    def _write_valid(self, message: dict[str, Any]) -> None:
        validator("ClientMessage").validate(message)
        self.write(json.dumps(message).encode())

    def _read(self) -> None:
        for line in self.output:
            try:
                self._arrived.put(json.loads(line))
            except ValueError:
                break
        self._arrived.put(None)


@contextmanager
def rpc_process(
    *arguments: str, command: Sequence[str] = (*EDGE_RUN, "rpc"), env: dict[str, str] | None = None
) -> Iterator[RpcClient]:
    """Start `edge-run rpc`; the client does not read yet, and is not initialized."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started([*command, *arguments], **pipes, env={**os.environ, **(env or {})}) as process:
        yield RpcClient(process)


@contextmanager
def rpc(*arguments: str, **options: Any) -> Iterator[RpcClient]:
    """Start `edge-run rpc` and initialize it."""
    with rpc_process(*arguments, **options) as client:
        client.read().initialize()
        yield client
