"""Reading the body of a request within limits of size and time."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from .error_objects import RefusedError
from .server_settings import ServerSettings


class ClientGoneError(Exception):
    """The client closed the connection; nobody reads a response."""


async def read_body(scope: Scope, receive: Receive, settings: ServerSettings) -> bytes:
    """Read the body of a request.

    Raises:
        RefusedError: it is too large (by its declared length before anything is read, else when the limit is passed),
            did not come in time, or its length is malformed.
        ClientGoneError: the client went away.
    """
    most = settings.max_body_bytes
    declared = Headers(scope=scope).get("content-length", "0")
    if not (declared.isascii() and declared.isdecimal()):
        raise RefusedError(HTTPStatus.BAD_REQUEST, "invalid_request", f"Content-Length is {declared!r:.50}")
    if int(declared[:20]) > most:
        raise _too_large(f"the body has {declared:.20} bytes", most)
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                body += message.get("body", b"")
                if len(body) > most:
                    raise _too_large(f"the body has more than {most} bytes", most)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise RefusedError(
            HTTPStatus.REQUEST_TIMEOUT, "timeout", f"the body did not come within {settings.body_timeout_s:g} seconds"
        ) from None


def _too_large(what: str, most: int) -> RefusedError:
    return RefusedError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        "request_too_large",
        what,
        f"the largest body is {most} bytes; start the server with a larger --max-body",
    )
