"""What goes over HTTP: bodies of requests, responses, and the pieces of streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...errors import EdgeError
from ...runtime.scheduling.request_run import LoopQueue
from .http_protocol import RefusedError, encode_json, error_status, protocol_of
from .server_settings import ServerSettings

LARGE_BODY: Final = 64 << 10
"""Bytes of a body from which on it is parsed in a thread, or it would keep all other clients waiting, and what it took
in memory goes back to the system."""
RETRY_AFTER_S: Final = 1
"""Seconds after which a client may repeat a request that was refused because others are waiting."""
_LINGER_S: Final = 1.0
"""How long what a client goes on sending after a refusal is thrown away, in seconds."""
_LINGER_BYTES: Final = 32 << 20
"""How much of it at most."""


def error_response(error: EdgeError, scope: Scope) -> Response:
    """The response to a request that failed with `error` before an answer began, in the form of its API."""
    status = error_status(error)
    headers = error.headers if isinstance(error, RefusedError) else {}
    if status in {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}:
        headers = {"retry-after": str(RETRY_AFTER_S), **headers}
    return JsonResponse(protocol_of(scope).error(error), status, headers)


class JsonResponse(Response):
    """A response with a JSON body."""

    def __init__(
        self, value: Any, status: HTTPStatus = HTTPStatus.OK, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(encode_json(value), status, headers, "application/json")


class UnreadBodyResponse(Response):
    """A response with an error to a client that may still be sending; the connection is closed if there is a body.

    Closing at once would reset the connection, and on some systems the client would lose the response with it. So what
    the client goes on sending is thrown away for a moment, up to a number of bytes.
    """

    def __init__(self, error: EdgeError, scope: Scope) -> None:
        response = error_response(error, scope)
        super().__init__(response.body, response.status_code, media_type="application/json")
        self.raw_headers = response.raw_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        request = Headers(scope=scope)
        has_body = "transfer-encoding" in request or request.get("content-length", "0") != "0"
        headers = [*self.raw_headers, (b"connection", b"close")] if has_body else self.raw_headers
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": has_body})
        if has_body:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LINGER_S):
                    unread = _LINGER_BYTES
                    while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
                        unread -= len(message.get("body", b""))
                        if unread < 0:
                            break
            await send({"type": "http.response.body", "body": b"", "more_body": False})


@asynccontextmanager
async def watching_client(receive: Receive, gone: Callable[[], object]) -> AsyncIterator[None]:
    """Call `gone` when the client disconnects within the block."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


async def next_events(queue: LoopQueue[bytes], silence_s: float, comment: bytes) -> list[bytes]:
    """The events that come next, none after the end; a comment where none come, so that a lost client is noticed."""
    try:
        async with asyncio.timeout(silence_s):
            return await queue.take()
    except TimeoutError:
        return [comment]


async def read_body(scope: Scope, receive: Receive, send: Send, settings: ServerSettings) -> bytes | None:
    """Read the body of a request.

    Returns:
        The body; None if the client went away, or has been told that its body is too large (by its declared length
        before anything is read, else when the limit is passed), late, or of a malformed length.
    """
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            return await _whole_body(scope, receive, settings.max_body_bytes)
    except TimeoutError:
        what = f"the body did not come within {settings.body_timeout_s:g} seconds"
        refusal = RefusedError(HTTPStatus.REQUEST_TIMEOUT, "timeout", what)
    except RefusedError as error:
        refusal = error
    await UnreadBodyResponse(refusal, scope)(scope, receive, send)
    return None


async def _whole_body(scope: Scope, receive: Receive, most: int) -> bytes | None:
    declared = Headers(scope=scope).get("content-length", "0")
    if not (declared.isascii() and declared.isdecimal()):
        raise RefusedError(HTTPStatus.BAD_REQUEST, "invalid_request", f"Content-Length is {declared!r:.50}")
    if int(declared[:20]) > most:
        raise _too_large(f"the body has {declared:.20} bytes", most)
    body = bytearray()
    while (message := await receive())["type"] != "http.disconnect":
        body += message.get("body", b"")
        if len(body) > most:
            raise _too_large(f"the body has more than {most} bytes", most)
        if not message.get("more_body", False):
            return bytes(body)
    return None


def _too_large(what: str, most: int) -> RefusedError:
    hint = f"the largest body is {most} bytes; start the server with a larger --max-body"
    return RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "request_too_large", what, hint)
