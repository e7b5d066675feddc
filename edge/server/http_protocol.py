"""What goes over HTTP: how the APIs write errors and streams, bodies of requests, responses."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ...errors import EdgeError
from ...models.hub.client import ConnectionFailedError, OfflineError
from ...runtime.scheduling.request_run import LoopQueue
from ..service.request_error import ErrorCode, RequestError, describe
from .server_settings import ServerSettings

_log: Final = logging.getLogger(__name__)
_STATUS: Final[Mapping[StrEnum, HTTPStatus]] = {
    ErrorCode.MODEL_NOT_FOUND: HTTPStatus.NOT_FOUND,
    ErrorCode.TOO_LARGE: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    ErrorCode.BUSY: HTTPStatus.TOO_MANY_REQUESTS,
    ErrorCode.SUPERSEDED: HTTPStatus.CONFLICT,
    ErrorCode.MODEL: HTTPStatus.INTERNAL_SERVER_ERROR,
    ErrorCode.INTERNAL: HTTPStatus.INTERNAL_SERVER_ERROR,
}
"""Status by code; 400 for all others."""
_HUB_ERRORS: Final[Mapping[type[EdgeError], tuple[HTTPStatus, str]]] = {
    OfflineError: (HTTPStatus.SERVICE_UNAVAILABLE, "offline"),
    ConnectionFailedError: (HTTPStatus.BAD_GATEWAY, "hub_unreachable"),
}
"""Status and code of errors that the network makes, by their class."""
_TYPES: Final = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}
EVENT_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Some reverse proxies hold events back unless they are told not to.
    (b"x-accel-buffering", b"no"),
]


class RefusedError(EdgeError):
    """A request is refused by the server itself, before a model sees it.

    Args:
        status: the HTTP status.
        code: what is wrong, for programs.
        what: what is wrong, with the value seen.
        hint: what to do about it.
        headers: further headers of the response.
    """

    def __init__(
        self, status: HTTPStatus, code: str, what: str, hint: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(what, hint)
        self.status: Final = status
        self.code: Final = code
        self.headers: Final = dict(headers or {})


def server_failure(error: Exception, hint: str = "") -> RequestError:
    """The error of a request on which the server fails; its log says more."""
    _log.error("a request failed: %s", type(error).__name__, exc_info=error)
    return RequestError(f"the server failed: {type(error).__name__}", hint, code=ErrorCode.INTERNAL)


def _described(error: EdgeError) -> tuple[HTTPStatus, dict[str, Any]]:
    """The HTTP status of an error, and the error as OpenAI's API describes it."""
    param = None
    if isinstance(error, RefusedError):
        status, code = error.status, error.code
    elif (of_hub := next((each for kind, each in _HUB_ERRORS.items() if isinstance(error, kind)), None)) is not None:
        status, code = of_hub
    else:
        told = describe(error)
        status, code, param = _STATUS.get(told.code, HTTPStatus.BAD_REQUEST), str(told.code), told.param
    kind = _TYPES.get(status, "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error")
    return status, {"message": str(error), "type": kind, "param": param, "code": code}


def encode_json(value: Any) -> bytes:
    """A value as JSON on one line, in UTF-8."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        # A file name that is not valid Unicode is written with escapes.
        return json.dumps(msgspec.to_builtins(value)).encode()


def event(value: Any) -> bytes:
    """An event without a name."""
    return b"data: " + encode_json(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """An event that is named by the `type` of its value, as in the Responses API."""
    return b"event: " + str(value["type"]).encode() + b"\n" + event(value)


@dataclass(frozen=True)
class Protocol:
    """How one API writes errors and streams."""

    error_form: Callable[[HTTPStatus, dict[str, Any]], dict[str, Any]]
    """The object of an error, from its status, and its `message`, `type`, `param` and `code` in OpenAI's API."""
    encode: Callable[[Any], bytes]
    """An object as a piece of a stream."""
    headers: list[tuple[bytes, bytes]]
    """Headers of a stream."""
    silence: bytes
    """What is sent where nothing else comes for a while, so that a connection that is gone is noticed."""
    end: bytes = b""
    """The last piece of a stream."""

    def error(self, error: EdgeError) -> dict[str, Any]:
        """An error as the object of a response, or of the middle of a stream."""
        return self.error_form(*_described(error))


def _openai_error(_status: HTTPStatus, error: dict[str, Any]) -> dict[str, Any]:
    return {"error": error}


_COMMENT: Final = b": the answer is being computed\n\n"
OPENAI: Final = Protocol(_openai_error, event, EVENT_HEADERS, _COMMENT, b"data: [DONE]\n\n")
RESPONSES: Final = Protocol(_openai_error, named_event, EVENT_HEADERS, _COMMENT)


class ProtocolRoute(Route):
    """A path of an API."""

    def __init__(self, protocol: Protocol, method: str, path: str, endpoint: ASGIApp | Callable[..., Any]) -> None:
        super().__init__(path, endpoint, methods=[method])
        self.protocol: Final = protocol


def protocol_of(scope: Scope) -> Protocol:
    """The API that a requested path belongs to; OpenAI's for unknown paths and those of no API."""
    own = (route for route in scope["app"].routes if isinstance(route, ProtocolRoute))
    return next((route.protocol for route in own if route.matches(scope)[0] is not Match.NONE), OPENAI)


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
    status, _ = _described(error)
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
