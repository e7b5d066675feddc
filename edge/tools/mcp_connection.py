"""The session with one MCP server: a process, over its standard input and output, or an address, over HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TextIO

from ...errors import EdgeError
from ...runtime.tools.function_tools import mismatch
from .tool_settings import ToolServer

if TYPE_CHECKING:
    from mcp import ClientSession
    from mcp_types import CallToolResult, PaginatedRequestParams

_log: Final = logging.getLogger(__name__)
START_S: Final = 60.0
"""Seconds within which a server has to list its tools: some are downloaded by their first start."""
CALL_S: Final = 600.0
"""Seconds within which a call has to end."""
_MOST_TOOLS: Final = 512
_MOST_CHARACTERS: Final = 100_000
"""Most characters of a result; a context has no room for more."""


@dataclass(frozen=True)
class ServerTool:
    """A tool of a server."""

    server: str
    name: str
    description: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of its arguments."""

    @property
    def id(self) -> str:
        """What conversations keep."""
        return f"{self.server}/{self.name}"

    def definition(self, name: str) -> dict[str, Any]:
        """What the chat template reads, with the name that the model gives it."""
        function: dict[str, Any] = {"name": name, "parameters": dict(self.parameters)}
        if self.description:
            function["description"] = self.description
        return {"type": "function", "function": function}

    def problem(self, values: Mapping[str, Any]) -> str:
        """What is wrong with arguments; empty where they may fit."""
        try:
            return mismatch(dict(values), self.parameters, "the arguments")
        except Exception:  # noqa: BLE001  a server may send any schema, and checks the arguments itself
            return ""


class McpConnection:
    """A server that was started, and how that went; used on one event loop, on which its fields are set.

    Args:
        server: what to start.
        changed: told of every change of the state.
        start_s: seconds within which it has to list its tools.
    """

    def __init__(self, server: ToolServer, changed: Callable[[], None], start_s: float) -> None:
        self.server: Final = server
        self.state: Literal["off", "starting", "running", "failed"] = "starting"
        self.error: str | None = None
        self.tools: tuple[ServerTool, ...] = ()
        """The tools of a server that runs."""
        self.known: Final = threading.Event()
        """Set when it runs, or has failed."""
        self.ended: Final = threading.Event()
        """Set when its process, or the session at its address, has ended."""
        self.session_lost = False
        """Whether the server no longer knows the session; a call that it refused for that was not made."""
        self._changed: Final = changed
        self._start_s: Final = start_s
        self.stop: Final = asyncio.Event()
        """Set to end it."""
        self._session: ClientSession | None = None

    async def run(self) -> None:
        """Run it until it is stopped or fails; its process has ended when this returns."""
        try:
            await self._run()
            self.state = "off" if self.error is None else "failed"
        except EdgeError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  what it is goes to the log; chats go on without the server
            _log.error("the server %s failed", self.server.name, exc_info=error)
            self._fail(EdgeError(f"it failed: {type(error).__name__}"))
        finally:
            self._session, self.tools = None, ()
            self.known.set()
            self.ended.set()
            self._changed()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """Call a tool; returns a text for the model, also where something goes wrong, and whether the call failed."""
        from mcp import MCPError  # noqa: PLC0415  an extra, and slow to import

        if self._session is None:
            return f"error: the server {self.server.name} does not run", True
        try:
            async with asyncio.timeout(CALL_S):
                return _read_result(await self._session.call_tool(name, dict(arguments)))
        except TimeoutError:
            return f"error: the tool has not answered within {CALL_S:.0f} seconds", True
        except MCPError as error:
            self.session_lost = bool(self.server.url) and str(error) == "Session terminated"  # the SDK's words for 404
            if "closed" not in str(error).lower() and not self.session_lost:
                return f"error: {_reason(error)}", True
            self._fail(EdgeError("the server has ended", "start it again"))
            return "error: the server has ended", True
        except Exception as error:  # noqa: BLE001  servers send what they like; the model may do better
            return f"error: {type(error).__name__}: {error}"[:_MOST_CHARACTERS], True

    def _fail(self, error: EdgeError) -> None:
        """Note that it has failed, and end it."""
        self.state, self.error, self._session, self.tools = "failed", str(error), None, ()
        self.stop.set()

    async def _run(self) -> None:
        """Start the process or open the session, and speak with the server until it is stopped.

        Raises:
            EdgeError: it could not be started, and why, on one line.
        """
        try:
            from mcp import ClientSession, StdioServerParameters  # noqa: PLC0415  an extra, and slow to import
            from mcp.client.stdio import stdio_client  # noqa: PLC0415
            from mcp.client.streamable_http import streamable_http_client  # noqa: PLC0415

            from .http_client import MAX_BYTES, http_client  # noqa: PLC0415
        except ImportError as error:
            raise EdgeError("the package mcp is missing", 'pip install "edge-run[mcp]"') from error
        logging.getLogger("mcp").setLevel(logging.CRITICAL)  # what it logs is raised as well, and said on one line
        with _errors() as (file, lines):
            started = False
            try:
                async with AsyncExitStack() as opened:
                    if url := self.server.url:
                        client = await opened.enter_async_context(http_client(self.server, lines))
                        transport = streamable_http_client(url, http_client=client, max_sse_event_size=MAX_BYTES)
                    else:
                        parameters = StdioServerParameters(
                            command=self.server.command,
                            args=list(self.server.arguments),
                            env=dict(self.server.environment),
                            encoding_error_handler="replace",
                        )
                        transport = stdio_client(parameters, errlog=file)
                    streams = await opened.enter_async_context(transport)
                    session = await opened.enter_async_context(ClientSession(*streams))
                    started = True
                    await self._speak(session)
            except Exception as error:
                if not self.stop.is_set():
                    raise self._failure(error, started=started, said=lines) from error

    async def _speak(self, session: ClientSession) -> None:
        """List the tools, and keep the session until the server is stopped.

        Raises:
            TimeoutError: it does not list them in time.
        """
        listing, ending = asyncio.ensure_future(self._list_tools(session)), asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait({listing, ending}, timeout=self._start_s, return_when=asyncio.FIRST_COMPLETED)
            if not self.stop.is_set():
                if not listing.done():
                    raise TimeoutError
                self.tools = tuple(listing.result())
                self._session, self.state = session, "running"
                self.known.set()
                self._changed()
                await ending
        finally:
            for task in (listing, ending):
                task.cancel()
            await asyncio.wait({listing, ending})

    async def _list_tools(self, session: ClientSession) -> list[ServerTool]:
        """All tools of the server, in its order."""
        from mcp_types import PaginatedRequestParams  # noqa: PLC0415  part of the extra

        await session.initialize()
        found: list[ServerTool] = []
        page: PaginatedRequestParams | None = None
        while len(found) < _MOST_TOOLS:
            listed = await session.list_tools(params=page)
            found += [
                ServerTool(self.server.name, tool.name, tool.description or tool.title or "", dict(tool.input_schema))
                for tool in listed.tools
            ]
            if listed.next_cursor is None:
                break
            page = PaginatedRequestParams(cursor=listed.next_cursor)
        return found[:_MOST_TOOLS]

    def _failure(self, error: BaseException, *, started: bool, said: deque[str]) -> EdgeError:
        """Why the server could not be started."""
        name, url = self.server.url or self.server.command, self.server.url
        while isinstance(error, BaseExceptionGroup):  # task groups make one of the first error
            error = error.exceptions[0]
        if isinstance(error, TimeoutError):
            what = f"{name} has not answered within {self._start_s:g} seconds"
            return EdgeError(what, f"is it an MCP server that speaks {'Streamable HTTP' if url else 'over stdio'}?")
        if isinstance(error, FileNotFoundError) and not started:
            return EdgeError(f"there is no command {name!r:.200}", "give its path, or install it")
        if isinstance(error, OSError) and not started:
            return EdgeError(f"{name} cannot be run: {error.strerror or error}", "give another command")
        last = next((line for line in reversed(said) if line.strip()), "")
        if "closed" in str(error).lower():
            what = f"{name} has ended"
        else:
            what = f"{name} cannot be used: {_reason(error)}" if url else f"{type(error).__name__}: {_reason(error)}"
        return EdgeError(" ".join(f"{what}{f'; it said: {last}' if last else ''}".split())[:500])


def _reason(error: BaseException) -> str:
    """Why something failed, on one line."""
    if str(error).startswith("Failed to parse"):  # what follows is a report of the parser
        return "the response is not a JSON-RPC message, or too long"
    return str(error) or type(error).__name__


def _read_result(result: CallToolResult) -> tuple[str, bool]:
    """The text of a result, in which what is not text is named, and whether the call failed."""
    parts = [
        text if (text := getattr(block, "text", None)) is not None else f"[{block.type}, which is not shown]"
        for block in result.content
    ]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False, default=str)]
    text = "\n".join(map(str, parts))
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[:_MOST_CHARACTERS]}\n[cut: the result has {len(text)} characters]"
    failed = bool(result.is_error)
    return f"error: {text}" if failed and not text.startswith("error") else text, failed


@contextmanager
def _errors() -> Iterator[tuple[TextIO, deque[str]]]:
    """A file for what a server writes to its standard error, and the last lines of it."""
    lines: deque[str] = deque(maxlen=20)
    reading, writing = os.pipe()

    def read() -> None:
        with open(reading, encoding="utf-8", errors="replace") as file, suppress(OSError):
            lines.extend(iter(lambda: file.readline(_MOST_CHARACTERS), ""))

    thread = threading.Thread(target=read, name="edge-run tool errors", daemon=True)
    thread.start()
    with open(writing, "w", encoding="utf-8") as file:
        yield file, lines
