"""How the APIs of the server write errors and streams."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Scope

from ...errors import EdgeError
from ...models.hub.client import ConnectionFailedError, OfflineError
from ..service.request_error import ErrorCode, RequestError, describe

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
_HUB_ERRORS: Final = (
    (OfflineError, HTTPStatus.SERVICE_UNAVAILABLE, "offline"),
    (ConnectionFailedError, HTTPStatus.BAD_GATEWAY, "hub_unreachable"),
)
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


def _described(error: EdgeError) -> RefusedError | RequestError:
    """An error as one with a code."""
    if isinstance(error, RefusedError):
        return error
    for kind, status, code in _HUB_ERRORS:
        if isinstance(error, kind):
            return RefusedError(status, code, error.what, error.hint)
    return describe(error)


def error_status(error: EdgeError) -> HTTPStatus:
    """The HTTP status of an error."""
    described = _described(error)
    if isinstance(described, RefusedError):
        return described.status
    return _STATUS.get(described.code, HTTPStatus.BAD_REQUEST)


def _error_fields(error: EdgeError) -> dict[str, Any]:
    """An error as OpenAI's API describes it."""
    described = _described(error)
    status = error_status(error)
    kind = _TYPES.get(status, "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error")
    param = described.param if isinstance(described, RequestError) else None
    return {"message": str(described), "type": kind, "param": param, "code": str(described.code)}


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
        return self.error_form(error_status(error), _error_fields(error))


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
