"""The MCP servers of the app: starts them when they are needed, offers their tools, and ends them."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError as FutureCancelledError
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import msgspec

from ....errors import EdgeError, InputError, UnknownIdError
from ....runtime.scheduling.request_run import Cancellation
from ....runtime.tools.function_tools import mismatch
from .mcp_connection import START_S, McpConnection, ServerFailedError, ServerTool, ToolResult, run_server
from .tool_settings import MAX_SERVERS, ToolServer, ToolSettings

_log: Final = logging.getLogger(__name__)
_CLOSE_S: Final = 10.0
_POLL_S: Final = 0.1
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_-]")


class ServerState(StrEnum):
    """How far a server is."""

    OFF = "off"
    STARTING = "starting"
    RUNNING = "running"
    FAILED = "failed"


@dataclass(frozen=True)
class OfferedTool:
    """A tool that an answer may call."""

    tool: ServerTool
    name: str
    """What the model calls it: tools of two servers may have one name."""

    @property
    def definition(self) -> dict[str, Any]:
        """What the chat template reads."""
        function: dict[str, Any] = {"name": self.name, "parameters": dict(self.tool.parameters)}
        if self.tool.description:
            function["description"] = self.tool.description
        return {"type": "function", "function": function}

    def problem(self, values: Mapping[str, Any]) -> str:
        """What is wrong with arguments; empty where they may fit."""
        try:
            return mismatch(dict(values), self.tool.parameters, "the arguments")
        except Exception:  # noqa: BLE001  a server may send any schema, and checks the arguments itself
            return ""


class _Running:
    """A server that was started, and how that went; its fields are set on the event loop.

    Args:
        server: what to start.
        changed: told of every change of the state.
        start_s: seconds within which it has to list its tools.
    """

    def __init__(self, server: ToolServer, changed: Callable[[], None], start_s: float) -> None:
        self.server: Final = server
        self.state = ServerState.STARTING
        self.error: str | None = None
        self.connection: McpConnection | None = None
        self.known: Final = threading.Event()
        """Set when it runs, or has failed."""
        self.ended: Final = threading.Event()
        """Set when its process has ended."""
        self._changed: Final = changed
        self._start_s: Final = start_s
        self._stop: asyncio.Event | None = None
        self._stopped = False

    async def run(self) -> None:
        """Run it to its end, on the event loop."""
        self._stop = asyncio.Event()
        if self._stopped:
            self._stop.set()
        try:
            await run_server(self.server, self._opened, self._stop, self._start_s)
            self.state = ServerState.OFF if self.error is None else ServerState.FAILED
        except ServerFailedError as error:
            self.fail(error)
        except Exception as error:  # noqa: BLE001  what it is goes to the log; chats go on without the server
            _log.error("the server %s failed", self.server.name, exc_info=error)
            self.fail(EdgeError(f"it failed: {type(error).__name__}"))
        finally:
            self.connection = None
            self.known.set()
            self.ended.set()
            self._changed()

    def _opened(self, connection: McpConnection) -> None:
        self.connection, self.state = connection, ServerState.RUNNING
        self.known.set()
        self._changed()

    def fail(self, error: EdgeError) -> None:
        """Note that it has failed."""
        self.state, self.error, self.connection = ServerState.FAILED, str(error), None
        self.stop()

    def stop(self) -> None:
        """End it, on the event loop."""
        self._stopped = True
        if self._stop is not None:
            self._stop.set()


class ToolServers:
    """The MCP servers that the user has listed. Any thread may call any method.

    Nothing is started before it is needed: by the settings that show the tools, or an answer that may call one.

    Args:
        folder: where the list is kept; None to keep none.
        changed: told of every change of a server's state.
        start_s: seconds within which a server has to list its tools.
    """

    def __init__(
        self, folder: Path | None = None, changed: Callable[[], None] = lambda: None, start_s: float = START_S
    ) -> None:
        self._settings: Final = ToolSettings(folder)
        self._changed: Final = changed
        self._start_s: Final = start_s
        self._lock: Final = threading.RLock()
        self._listed: dict[str, ToolServer] | None = None
        self._running: Final[dict[str, _Running]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def servers(self) -> list[dict[str, Any]]:
        """All servers with their tools and states, as JSON objects; starts those that are on."""
        with self._lock:
            for server in self._all().values():
                self._started(server)
            return [self._described(server) for server in self._all().values()]

    @property
    def problem(self) -> str | None:
        """Why the list could not be read."""
        with self._lock:
            self._all()
            return self._settings.problem

    def save(self, server: ToolServer) -> None:
        """Add a server, or replace that of its name, which ends; it is started if it is on.

        Raises:
            InputError: it is not one, or there are too many.
            EdgeError: the list cannot be written.
        """
        server.check()
        with self._lock:
            listed = {**self._all(), server.name: server}
            if len(listed) > MAX_SERVERS:
                raise InputError(f"there are {MAX_SERVERS} servers already", "remove one first")
            self._write(listed)
            self._end(server.name)
            self._started(server)
        self._changed()

    def remove(self, name: str) -> None:
        """Take a server off the list, and end it.

        Raises:
            UnknownIdError: there is none of that name.
            EdgeError: the list cannot be written.
        """
        with self._lock:
            if name not in self._all():
                raise UnknownIdError("server", name)
            self._write({key: server for key, server in self._all().items() if key != name})
            self._end(name)
        self._changed()

    def offered(self, ids: Sequence[str], cancellation: Cancellation) -> list[OfferedTool]:
        """The tools of these ids that are there, once the servers that have them run.

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
            if running is not None:
                while not running.known.wait(_POLL_S):
                    cancellation.check()
        return self.known(ids)

    def known(self, ids: Sequence[str]) -> list[OfferedTool]:
        """The tools of these ids whose servers run; starts nothing."""
        with self._lock:
            connections = [each.connection for each in self._running.values()]
        tools = {tool.id: tool for each in connections if each is not None for tool in each.tools}
        chosen = [tools[each] for each in ids if each in tools]
        names = [_NOT_IN_NAMES.sub("_", tool.name) for tool in chosen]
        return [
            OfferedTool(tool, name if names.count(name) == 1 else f"{tool.server}_{name}")
            for tool, name in zip(chosen, names, strict=True)
        ]

    def call(self, tool: ServerTool, values: Mapping[str, Any], cancellation: Cancellation) -> ToolResult:
        """Call a tool and wait for its result; whatever goes wrong is the result.

        Raises:
            CancelledError: it was cancelled.
        """
        with self._lock:
            running, loop = self._running.get(tool.server), self._loop
        connection = None if running is None else running.connection
        if running is None or loop is None or connection is None:
            return ToolResult(f"error: the server {tool.server} does not run", failed=True)
        future = asyncio.run_coroutine_threadsafe(connection.call(tool.name, values), loop)

        def cancel() -> None:
            future.cancel()

        with cancellation.calling(cancel):
            try:
                return future.result()
            except FutureCancelledError:
                cancellation.check()
                return ToolResult(f"error: the server {tool.server} was ended", failed=True)
            except ServerFailedError as error:
                loop.call_soon_threadsafe(running.fail, error)
                return ToolResult(f"error: {error.what}", failed=True)

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
            self._listed = {server.name: server for server in self._settings.read()}
        return self._listed

    def _write(self, servers: Mapping[str, ToolServer]) -> None:
        listed = dict(sorted(servers.items()))
        self._settings.write(list(listed.values()))
        self._listed = listed

    def _started(self, server: ToolServer) -> _Running | None:
        """The process of a server, which is started if it is on and was not; the lock is held."""
        if not server.enabled or self._closed:
            return None
        if server.name not in self._running:
            running = _Running(server, self._changed, self._start_s)
            self._running[server.name] = running
            asyncio.run_coroutine_threadsafe(running.run(), self._open_loop())
        return self._running[server.name]

    def _end(self, name: str) -> None:
        """Let a server end; the lock is held."""
        running = self._running.pop(name, None)
        if running is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(running.stop)

    def _open_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run_loop, args=(self._loop,), name="edge-run tools", daemon=True).start()
        return self._loop

    def _described(self, server: ToolServer) -> dict[str, Any]:
        running = self._running.get(server.name)
        connection = None if running is None else running.connection
        return {
            **msgspec.structs.asdict(server),
            "state": ServerState.OFF if running is None else running.state,
            "error": None if running is None else running.error,
            "tools": [
                {"id": tool.id, "name": tool.name, "description": tool.description}
                for tool in (() if connection is None else connection.tools)
            ],
        }


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        with suppress(RuntimeError):
            loop.close()
