"""Servers that tests start, and requests to them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from email.message import Message
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
from starlette.types import ASGIApp

from edgerun import load
from edgerun.edge.server.asgi_app import asgi_app
from edgerun.edge.server.endpoints import RequestService
from edgerun.edge.server.server_settings import ServerSettings
from edgerun.edge.server.uvicorn_server import DrainingServer, bound_socket
from edgerun.edge.service.model_pool import ModelPool
from support.processes import EDGE_RUN, started_until

PATIENCE_S = 120.0
"""Limit of every wait, far above what it takes."""
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Answered:
    """A response."""

    status: int
    headers: Message
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Served:
    """A server that runs."""

    base: str
    """Its address, such as http://127.0.0.1:8080."""
    process: subprocess.Popen[bytes] | None = None
    lines: list[str] = field(default_factory=list)
    """What it wrote to standard error, without line ends."""

    @property
    def port(self) -> int:
        return int(self.base.rpartition(":")[2])

    def request(self, method: str, path: str, body: Any = None) -> Answered:
        """Send a request; a body is sent as JSON."""
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)) as connection:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return Answered(response.status, response.headers, response.read())

    def get(self, path: str) -> str:
        """The text at a path."""
        response = self.request("GET", path)
        assert response.status == 200
        return response.body.decode()

    def post(self, path: str, body: Any) -> Any:
        """The JSON value that a body is answered with."""
        response = self.request("POST", path, body)
        assert response.status == 200, response.body
        return response.json()

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        found = re.findall(rf"^edgerun_{name}(?:\{{.*\}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        return sum(map(float, found))

    def load(self) -> tuple[float, float]:
        """Numbers of answers being generated and of requests that wait."""
        return self.metric("requests_running"), self.metric("requests_waiting")

    def connected(self) -> socket.socket:
        """A connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)


@contextmanager
def served(models: Sequence[str | Path], *options: str, **environment: str) -> Iterator[Served]:
    """Run `edge-run serve` on a free port, as a process."""

    command = [*EDGE_RUN, "serve", *map(str, models), "--port", "0", *options]
    server = Served("")

    def take(line: str) -> bool:
        server.lines.append(line)
        if address := re.search(r"(http://\S+)/v1 \(", line):
            server.base = address[1]
        # The socket is bound before this line is written, so a client that connects now is heard.
        return "try: curl" in line

    with started_until(command, take, PATIENCE_S, env={**os.environ, **environment}) as server.process:
        assert server.base, server.lines
        yield server


@contextmanager
def served_here(model: Path, settings: ServerSettings, **options: Any) -> Iterator[Served]:
    """Run a server in a thread of this process, with settings that the command does not have."""
    pool = ModelPool([str(model)], lambda path, progress: load(path, progress=progress, **options))
    listening = bound_socket("127.0.0.1", 0)
    service = RequestService(pool, settings)
    server = DrainingServer(asgi_app(service), service, 0.0)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield Served(f"http://127.0.0.1:{listening.getsockname()[1]}")
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def asked(
    app: ASGIApp,
    method: str,
    path: str,
    *,
    base: str = "http://localhost",
    address: str = "127.0.0.1",
    **options: Any,
) -> httpx.Response:
    """Send one request to an ASGI application in this process."""

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app, client=(address, 1)), base_url=base) as client:
            return await client.request(method, path, **options)

    return asyncio.run(ask())


def chat_body(text: str = "list the files", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def raw_request(path: str, body: Any, headers: Mapping[str, str] | None = None) -> bytes:
    """A POST request as it goes over the wire."""
    data = json.dumps(body).encode()
    lines = {
        "Host": "localhost",
        "Content-Type": "application/json",
        "Content-Length": str(len(data)),
        **(headers or {}),
    }
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return head.encode() + b"\r\n" + data


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes or resets the connection."""
    pieces = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            pieces += piece
    return pieces
