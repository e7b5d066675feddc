"""The chat app as a process, and a client that has been let in."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from support.processes import EDGE_RUN, started_until

PATIENCE_S = 120.0
"""Limit of every wait, far above what it takes."""
_CLIENT: Final[Any] = {"timeout": PATIENCE_S, "trust_env": False, "verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)}
"""Options of clients; a default context of TLS reads a file of trusted issuers."""


@dataclass
class RunningApp:
    """An app that runs as a process."""

    process: subprocess.Popen[bytes]
    home: Path
    """Its folder of data."""
    url: str = ""
    """The address with the one-time token."""
    lines: list[str] = field(default_factory=list)
    """What it wrote to standard error, without line ends."""

    @property
    def base(self) -> str:
        """Its address without the token."""
        return self.url.partition("/open")[0]

    @property
    def port(self) -> int:
        return int(self.base.rpartition(":")[2])

    def client(self) -> httpx.Client:
        """A client without a session."""
        return httpx.Client(base_url=self.base, **_CLIENT)

    @contextmanager
    def entered(self) -> Iterator[httpx.Client]:
        """A client that has used the token of the address."""
        with self.client() as client:
            assert client.get(self.url).status_code == 303
            yield client

    def end(self) -> int:
        """End the app as Ctrl-C does, and return its exit code."""
        self.process.send_signal(signal.SIGINT if os.name != "nt" else signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


@contextmanager
def running_app(home: Path, *arguments: str | Path, **environment: str) -> Iterator[RunningApp]:
    """Run `edge-run app --no-browser` with its data in `home`; without a port among the arguments, on a free one."""
    port = () if "--port" in arguments else ("--port", "0")
    command = [*EDGE_RUN, "app", "--no-browser", *map(str, arguments), *port]
    # Where a request makes the app start at login, it does not do so on this machine.
    folders = {name: str(home) for name in ("EDGERUN_HOME", "HOME", "APPDATA", "XDG_CONFIG_HOME")}
    options: dict[str, Any] = {"env": {**os.environ, **folders, **environment}}
    lines: list[str] = []
    addresses: list[str] = []

    def take(line: str) -> bool:
        lines.append(line)
        # The socket is bound before this line is written, so a client that connects now is heard.
        addresses.extend(re.findall(r"edge-run: open (http://\S+)", line))
        return bool(addresses)

    with started_until(command, take, PATIENCE_S, **options) as process:
        assert addresses, lines
        yield RunningApp(process, home, addresses[0], lines)


Json = dict[str, Any]


class Window:
    """A window that shows the page: a client, and the events that it has seen."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client
        self.events: list[Json] = []
        self._changed = threading.Condition()

    def see(self, event: Json) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def of(self, kind: str, message: str | None = None) -> list[Json]:
        """The events of a type, or those of a message, which they hold or name."""
        found = [(event, event.get("message")) for event in list(self.events) if event["type"] == kind]
        ids = [about["id"] if isinstance(about, dict) else about for _, about in found]
        return [event for (event, _), id_ in zip(found, ids, strict=True) if message in (None, id_)]

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        """Wait until the events make a condition true."""
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE_S), what

    def wait_for_end(self, message: str) -> Json:
        """Wait for the end of an answer, and return it."""

        def ends() -> list[Json]:
            return [event["message"] for event in self.of("message", message) if event["message"]["state"] != "writing"]

        self.wait(ends, "the answer ends")
        return ends()[-1]

    def text(self, message: str) -> str:
        """The text of an answer as the events tell it."""
        pieces = self.of("delta", message)
        assert [piece["sequence"] for piece in pieces] == list(range(1, len(pieces) + 1))
        return "".join(piece["text"] for piece in pieces)


@contextmanager
def window(app: RunningApp, cookies: httpx.Cookies) -> Iterator[Window]:
    """Open a window, which listens when this returns."""
    with httpx.Client(base_url=app.base, cookies=cookies, **_CLIENT) as client:
        seen = Window(client)
        ready = threading.Event()
        with client.stream("GET", "/api/events") as response:
            assert response.status_code == 200

            def read() -> None:
                try:
                    for line in response.iter_lines():
                        if line.startswith("data: "):
                            seen.see(json.loads(line.removeprefix("data: ")))
                        ready.set()
                except (httpx.HTTPError, httpx.StreamError):
                    pass

            thread = threading.Thread(target=read, daemon=True)
            thread.start()
            assert ready.wait(PATIENCE_S)
            try:
                yield seen
            finally:
                # The thread that reads would notice the end of a closed response with the next comment only.
                with suppress(OSError):
                    response.extensions["network_stream"].get_extra_info("socket").shutdown(socket.SHUT_RDWR)
                thread.join(PATIENCE_S)


def ask(client: httpx.Client, path: str, body: Json | None = None) -> Any:
    """What the app answers to a request, which has succeeded."""
    response = client.get(path) if body is None else client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def post(client: httpx.Client, path: str, status: int = 200, **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def new_conversation(client: httpx.Client, **fields: Any) -> str:
    return str(post(client, "/api/conversations", **fields)["conversation"]["id"])


def send(client: httpx.Client, conversation: str, content: str, parent: str | None = None) -> Json:
    """Send a message; returns the answer that has begun."""
    sent = post(client, f"/api/conversations/{conversation}/messages", parent=parent, content=content)
    assert sent["message"]["content"] == content
    answer: Json = sent["answer"]
    assert (answer["state"], answer["parent"]) == ("writing", sent["message"]["id"])
    return answer


def read(client: httpx.Client, conversation: str) -> Json:
    got: Json = ask(client, f"/api/conversations/{conversation}")
    return got


def messages_of(client: httpx.Client, conversation: str) -> dict[str, Json]:
    return {message["id"]: message for message in read(client, conversation)["messages"]}
