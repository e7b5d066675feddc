"""The HTTP client for one MCP server that has an address."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from typing import Final, cast

import httpx2

from ..server.server_settings import LOOPBACK_HOSTS
from .tool_settings import ToolServer, host_of

MAX_BYTES: Final = 16 << 20
"""Bytes of a response above which the rest is not read."""
_CONNECT_S: Final = 30.0
_END_S: Final = 5.0
"""Seconds that the request may take that ends a session."""


class _FirstBytes(httpx2.AsyncByteStream):
    """The body of a response up to `MAX_BYTES`."""

    def __init__(self, whole: httpx2.AsyncByteStream) -> None:
        self._whole = whole

    async def __aiter__(self) -> AsyncIterator[bytes]:
        room = MAX_BYTES
        async for part in self._whole:
            yield part[:room]
            room -= len(part)
            if room <= 0:
                return

    async def aclose(self) -> None:
        await self._whole.aclose()


def http_client(server: ToolServer, errors: deque[str]) -> httpx2.AsyncClient:
    """A client that sends the headers of a server, and waits for responses as long as the caller does.

    Responses are not compressed, so that their size is that of what is read. Programs of this machine are reached
    without the proxy that the environment may name. For a session that a server has forgotten, the protocol has the
    status 404, and many servers send 400.

    Args:
        server: the server.
        errors: gets the status of every response that reports an error.
    """

    async def limit_end(request: httpx2.Request) -> None:
        if request.method == "DELETE":
            request.extensions["timeout"] = httpx2.Timeout(_END_S).as_dict()

    async def limit_body(response: httpx2.Response) -> None:
        if response.is_error:
            errors.append(f"{response.status_code} {response.reason_phrase}")
        if response.status_code in {400, 404} and "mcp-session-id" in response.request.headers:
            response.status_code = 404  # with any body, so that the SDK says that the session has ended
            response.headers.pop("content-type", None)
        response.headers.pop("content-encoding", None)
        response.stream = _FirstBytes(cast(httpx2.AsyncByteStream, response.stream))

    return httpx2.AsyncClient(
        headers={**server.headers, "accept-encoding": "identity"},
        timeout=httpx2.Timeout(_CONNECT_S, read=None),
        trust_env=host_of(server.url) not in LOOPBACK_HOSTS,
        event_hooks={"request": [limit_end], "response": [limit_body]},
    )
