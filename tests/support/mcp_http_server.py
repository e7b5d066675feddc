"""An MCP server at an address (Streamable HTTP), which answers well or badly, and notes its requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, TypeAlias

Json: TypeAlias = dict[str, Any]
TOOL: Final = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "inputSchema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


class McpHttpServer(ThreadingHTTPServer):
    """The server.

    `faults` has what happens to requests of a method in place of a right response; it gets the handler.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url: Final = f"http://127.0.0.1:{self.server_address[1]}/mcp"
        self.as_events = False
        """Whether responses are streams of events."""
        self.faults: dict[str, Callable[[_Handler], None]] = {}
        self.requests: list[tuple[str, Json, dict[str, str]]] = []
        """Method of HTTP, message and headers of every request, whose names are in lower case."""
        self.sessions: set[str] = set()
        self.refusal: tuple[int, bytes] = (404, b"")
        """Status and JSON of the response to requests of a session that is not known."""
        self.ending: Final = threading.Event()

    def calls(self) -> list[str]:
        """The cities whose weather was asked for."""
        messages = [message for _, message, _ in self.requests if message.get("method") == "tools/call"]
        return [message["params"]["arguments"]["city"] for message in messages]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: McpHttpServer

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name of the base class
        """Write nothing to standard error."""

    def do_GET(self) -> None:
        self._note({})
        self.reply(405, b"")

    def do_DELETE(self) -> None:
        headers = self._note({})
        self.server.sessions.discard(headers["mcp-session-id"])
        self.reply(204, b"")

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        headers, method = self._note(message), message["method"]
        with suppress(ConnectionError):
            if (fault := self.server.faults.get(method)) is not None:
                fault(self)
            elif method == "initialize":
                session = f"session {len(self.server.requests)}"
                self.server.sessions.add(session)
                result = {"protocolVersion": message["params"]["protocolVersion"], "capabilities": {"tools": {}}}
                self._result(message, {**result, "serverInfo": {"name": "fake", "version": "1"}}, session)
            elif headers.get("mcp-session-id") not in self.server.sessions:
                self.reply(*self.server.refusal, content_type="application/json")
            elif "id" not in message:
                self.reply(202, b"")
            elif method == "tools/list":
                self._result(message, {"tools": [TOOL]})
            else:
                text = f"{message['params']['arguments']['city']}: sunny"
                self._result(message, {"content": [{"type": "text", "text": text}]})

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        """Send a whole response; names of headers have `_` for `-`."""
        self.send_response(status)
        for name, value in {"content_length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def stream(self, content_type: str, piece: bytes) -> None:
        """Send a response that never ends."""
        self.send_response(200)
        self.send_header("content-type", content_type)
        self.send_header("connection", "close")
        self.end_headers()
        while not self.server.ending.is_set():
            self.wfile.write(piece)

    def _note(self, message: Json) -> dict[str, str]:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append((self.command, message, headers))
        return headers

    def _result(self, message: Json, result: Json, session: str | None = None) -> None:
        body = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}).encode()
        kind = "application/json"
        if self.server.as_events:
            kind, body = "text/event-stream", b": a comment\n\nevent: message\ndata: " + body + b"\n\n"
        others = {} if session is None else {"mcp_session_id": session}
        self.reply(200, body, content_type=kind, **others)


@contextmanager
def mcp_http_server() -> Iterator[McpHttpServer]:
    """A server that runs within the block."""
    with McpHttpServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.ending.set()
            server.shutdown()
            thread.join()
