"""The MCP servers of conversations: starts them when they are needed, offers their tools, and ends them."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError as FutureCancelledError
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from ...errors import InputError, UnknownIdError
from ...runtime.scheduling.request_run import Cancellation
from .mcp_connection import START_S, McpConnection, ServerTool
from .tool_settings import FILE_NAME, MAX_SERVERS, ServerFields, ToolServer, read_servers, write_servers

_CLOSE_S: Final = 10.0
_POLL_S: Final = 0.1
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_-]")


class ToolServers:
    """The MCP servers that the user has listed. Any thread may call any method.

    Nothing is started before it is needed: by the settings that show the tools, or an answer that may call one.

    Args:
        folder: where the list is kept; None to keep none.
        changed: told of every change of a server's state.
        start_s: seconds within which a server has to list its tools.
        servers: the list of this process, in place of the one that is kept.
    """

    def __init__(
        self,
        folder: Path | None = None,
        changed: Callable[[], None] = lambda: None,
        start_s: float = START_S,
        servers: Sequence[ToolServer] = (),
    ) -> None:
        self._path: Final = None if folder is None else folder / FILE_NAME
        self._problem: str | None = None
        """Why the list could not be read."""
        self._changed: Final = changed
        self._start_s: Final = start_s
        self._lock: Final = threading.RLock()
        self._listed = {server.name: server for server in servers} or None
        self._running: Final[dict[str, McpConnection]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def list(self) -> dict[str, Any]:
        """All servers with their tools and states, and why the list could not be read; starts those that are on."""
        with self._lock:
            found = [(server, self._started(server)) for server in self._all().values()]
        servers = [
            {
                **msgspec.structs.asdict(server),
                "state": "off" if running is None else running.state,
                "error": None if running is None else running.error,
                "tools": [
                    {"id": tool.id, "name": tool.name, "description": tool.description}
                    for tool in (() if running is None else running.tools)
                ],
            }
            for server, running in found
        ]
        return {"servers": servers, "problem": self._problem}

    def save(self, name: str, body: ServerFields) -> dict[str, Any]:
        """Add a server, or replace the one of its name, which ends; it is started if it is on. Returns the list.

        Raises:
            InputError: it is not one, or there are too many.
            EdgeError: the list cannot be written.
        """
        server = ToolServer(name=name, **msgspec.structs.asdict(body))
        server.check()
        with self._lock:
            listed = {**self._all(), server.name: server}
            if len(listed) > MAX_SERVERS:
                raise InputError(f"there are {MAX_SERVERS} servers already", "remove one first")
            self._replace(listed, server.name)
            self._started(server)
        self._changed()
        return self.list()

    def remove(self, name: str) -> dict[str, Any]:
        """Take a server off the list, and end it. Returns the list.

        Raises:
            UnknownIdError: there is none of that name.
            EdgeError: the list cannot be written.
        """
        with self._lock:
            if name not in self._all():
                raise UnknownIdError("server", name)
            self._replace({key: server for key, server in self._all().items() if key != name}, name)
        self._changed()
        return self.list()

    def offered(self, ids: Sequence[str], cancellation: Cancellation) -> dict[str, ServerTool]:
        """The tools of these ids that are there, once the servers that have them run, by the names for the model.

        Args:
            ids: `server/tool`. What is not there, or of a server that is off or has failed, is left out.
            cancellation: ends the waiting.

        Raises:
            CancelledError: it was cancelled.
        """
        for name in dict.fromkeys(each.partition("/")[0] for each in ids):
            with self._lock:
                server = self._all().get(name)
                running = None if server is None else self._started(server)
            while running is not None and not running.known.wait(_POLL_S):
                cancellation.check()
        return self.known(ids)

    def known(self, ids: Sequence[str]) -> dict[str, ServerTool]:
        """The tools of these ids whose servers run, by the names for the model; starts nothing."""
        with self._lock:
            tools = {tool.id: tool for running in self._running.values() for tool in running.tools}
        chosen = [tools[each] for each in ids if each in tools]
        names = [_NOT_IN_NAMES.sub("_", tool.name) for tool in chosen]
        found: dict[str, ServerTool] = {}
        for tool, name in zip(chosen, names, strict=True):
            unique = name if names.count(name) == 1 else f"{tool.server}_{name}"
            while unique in found:
                unique += "_"
            found[unique] = tool
        return found

    def call(self, tool: ServerTool, values: Mapping[str, Any], cancellation: Cancellation) -> tuple[str, bool]:
        """Call a tool and wait for its result: a text for the model, and whether the call failed.

        Where the server at an address has forgotten the session, the call is made in a new one.

        Raises:
            CancelledError: it was cancelled.
        """
        result = "", True
        for _ in range(2):
            with self._lock:
                running, loop = self._running.get(tool.server), self._loop
            if running is None or loop is None:
                return f"error: the server {tool.server} does not run", True
            future = asyncio.run_coroutine_threadsafe(running.call(tool.name, values), loop)
            with cancellation.calling(future.cancel):
                try:
                    result = future.result()
                except FutureCancelledError:
                    cancellation.check()
                    return f"error: the server {tool.server} was ended", True
            if not running.session_lost:
                break
            with self._lock:
                if self._running.get(tool.server) is running:
                    self._end(tool.server)
            self.offered([tool.id], cancellation)
        return result

    def close(self) -> None:
        """End all servers, and wait until their processes have ended."""
        with self._lock:
            self._closed = True
            running, loop = list(self._running.values()), self._loop
            for name in list(self._running):
                self._end(name)
        for each in running:
            each.ended.wait(_CLOSE_S)
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    def _all(self) -> dict[str, ToolServer]:
        if self._listed is None:
            servers, self._problem = ([], None) if self._path is None else read_servers(self._path)
            self._listed = {server.name: server for server in servers}
        return self._listed

    def _replace(self, servers: Mapping[str, ToolServer], name: str) -> None:
        """Keep the list, in which the server of a name is another or none, so that it ends; the lock is held."""
        listed = dict(sorted(servers.items()))
        if self._path is not None:
            write_servers(self._path, list(listed.values()), unreadable=self._problem is not None)
            self._problem = None
        self._listed = listed
        self._end(name)

    def _started(self, server: ToolServer) -> McpConnection | None:
        """The process of a server, which is started if it is on and was not; the lock is held."""
        if not server.enabled or self._closed:
            return None
        if server.name not in self._running:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run_loop, args=(self._loop,), name="edge-run tools", daemon=True).start()
            running = self._running[server.name] = McpConnection(server, self._changed, self._start_s)
            asyncio.run_coroutine_threadsafe(running.run(), self._loop)
        return self._running[server.name]

    def _end(self, name: str) -> None:
        """Let a server end; the lock is held."""
        running = self._running.pop(name, None)
        if running is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(running.stop.set)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        with suppress(RuntimeError):
            loop.close()
