"""One MCP server as a process, and the session with it over its standard input and output."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TextIO

from ....errors import EdgeError
from .tool_settings import ToolServer

if TYPE_CHECKING:
    from mcp import ClientSession
    from mcp_types import CallToolResult, PaginatedRequestParams

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


@dataclass(frozen=True)
class ToolResult:
    """What a call gave."""

    text: str
    """For the model to read."""
    failed: bool = False


class ServerFailedError(EdgeError):
    """A server could not be started, or has ended."""


class McpConnection:
    """A server that runs; made and used on one event loop.

    Args:
        session: the session with it.
        tools: its tools.
    """

    def __init__(self, session: ClientSession, tools: Sequence[ServerTool]) -> None:
        self._session: Final = session
        self.tools: Final = tuple(tools)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool; whatever goes wrong is its result.

        Raises:
            ServerFailedError: the server has ended.
        """
        from mcp import MCPError  # noqa: PLC0415  an extra, and slow to import

        try:
            async with asyncio.timeout(CALL_S):
                return _read_result(await self._session.call_tool(name, dict(arguments)))
        except TimeoutError:
            return ToolResult(f"error: the tool has not answered within {CALL_S:.0f} seconds", failed=True)
        except MCPError as error:
            if "closed" in str(error).lower():
                raise ServerFailedError("the server has ended", "start it again in the settings") from error
            return ToolResult(f"error: {error}", failed=True)
        except Exception as error:  # noqa: BLE001  servers send what they like; the model may do better
            return ToolResult(f"error: {type(error).__name__}: {error}"[:_MOST_CHARACTERS], failed=True)


async def run_server(
    server: ToolServer, opened: Callable[[McpConnection], None], ended: asyncio.Event, start_s: float = START_S
) -> None:
    """Run a server until `ended` is set; its process has ended when this returns.

    Args:
        server: what to start.
        opened: called when it has listed its tools.
        ended: ends it.
        start_s: seconds within which it has to list its tools.

    Raises:
        ServerFailedError: it could not be started, and why, on one line.
    """
    try:
        from mcp import ClientSession, StdioServerParameters  # noqa: PLC0415  an extra, and slow to import
        from mcp.client.stdio import stdio_client  # noqa: PLC0415
    except ImportError as error:
        raise ServerFailedError("the package mcp is missing", 'pip install "edge-run[mcp]"') from error
    parameters = StdioServerParameters(
        command=server.command,
        args=list(server.arguments),
        env=dict(server.environment),
        encoding_error_handler="replace",
    )
    with _errors() as (file, lines):
        started = False
        try:
            async with stdio_client(parameters, errlog=file) as streams, ClientSession(*streams) as session:
                started = True
                tools = await _before(ended, _start(session, server.name), start_s)
                if tools is not None:
                    opened(McpConnection(session, tools))
                    await ended.wait()
        except Exception as error:
            if ended.is_set():
                return
            cause = _leaf(error)
            if isinstance(cause, TimeoutError):
                what = f"{server.command} has not answered within {start_s:g} seconds"
                raise ServerFailedError(what, "is it an MCP server that speaks over stdio?") from error
            raise _failure(server, cause, started=started, said=lines) from error


def _failure(server: ToolServer, error: BaseException, *, started: bool, said: deque[str]) -> ServerFailedError:
    """Why a server could not be started."""
    if isinstance(error, FileNotFoundError) and not started:
        return ServerFailedError(f"there is no command {server.command!r:.200}", "give its path, or install it")
    if isinstance(error, OSError) and not started:
        return ServerFailedError(f"{server.command} cannot be run: {error.strerror or error}", "give another command")
    last = next((line for line in reversed(said) if line.strip()), "")
    what = f"{server.command} has ended" if "closed" in str(error).lower() else f"{type(error).__name__}: {error}"
    return ServerFailedError(" ".join(f"{what}{f'; it said: {last}' if last else ''}".split())[:500])


def _leaf(error: BaseException) -> BaseException:
    """The first error of a group, which task groups make of one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _before(
    ended: asyncio.Event, start: Coroutine[Any, Any, list[ServerTool]], start_s: float
) -> list[ServerTool] | None:
    """The tools of a server that starts; None if it was ended before it had listed them.

    Raises:
        TimeoutError: it takes too long.
    """
    starting, ending = asyncio.ensure_future(start), asyncio.ensure_future(ended.wait())
    try:
        await asyncio.wait({starting, ending}, timeout=start_s, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            return starting.result()
        if ending.done():
            return None
        raise TimeoutError
    finally:
        for task in (starting, ending):
            task.cancel()
        await asyncio.wait({starting, ending})


async def _start(session: ClientSession, server: str) -> list[ServerTool]:
    """Begin to speak with a server, and return its tools."""
    await session.initialize()
    return await _list_tools(session, server)


async def _list_tools(session: ClientSession, server: str) -> list[ServerTool]:
    """All tools of a server, in its order."""
    from mcp_types import PaginatedRequestParams  # noqa: PLC0415  part of the extra

    found: list[ServerTool] = []
    page: PaginatedRequestParams | None = None
    while len(found) < _MOST_TOOLS:
        listed = await session.list_tools(params=page)
        found += [
            ServerTool(server, tool.name, tool.description or tool.title or "", dict(tool.input_schema))
            for tool in listed.tools
        ]
        if listed.next_cursor is None:
            break
        page = PaginatedRequestParams(cursor=listed.next_cursor)
    return found[:_MOST_TOOLS]


def _read_result(result: CallToolResult) -> ToolResult:
    """The text of a result; what is not text is named."""
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
    return ToolResult(f"error: {text}" if failed and not text.startswith("error") else text, failed)


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
