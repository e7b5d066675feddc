"""Who may use the server: host names, web origins, the API key, and content types.

A web page can make the browser send requests to a server on the same machine. Requests whose `Host` is not a name of
this server come from a page whose name was pointed at this machine (DNS rebinding). Requests with another `Origin` come
from a page of another site; browsers send some of them without asking the server first, so they are refused before
anything is done, and bodies have to be declared as JSON, which a page cannot do without asking.
"""

from __future__ import annotations

import hmac
from http import HTTPStatus
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .error_objects import RefusedError, UnreadBodyResponse
from .server_settings import MAX_HEADER_BYTES, ServerSettings

OPEN_PATHS: Final = ("/health",)
"""Paths that need no API key: they tell nothing but that the server runs."""
_WITH_BODY: Final = ("POST", "PUT", "PATCH")
"""Methods whose requests have a body."""


class OriginGuard:
    """Middleware that refuses requests to unknown host names and from pages of other sites."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app: Final = app
        self._settings: Final = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            await UnreadBodyResponse(refusal)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> RefusedError | None:
        headers = Headers(scope=scope)
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            return RefusedError(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                "headers_too_large",
                f"the headers have more than {MAX_HEADER_BYTES} bytes",
            )
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or not self._settings.allows_host(hosts[0]):
            shown = hosts[0] if hosts else "missing"
            return RefusedError(
                HTTPStatus.MISDIRECTED_REQUEST,
                "host_not_allowed",
                f"the Host header {shown!r:.200} is not a name of this server",
                "use localhost or 127.0.0.1, or start the server with --allow-host NAME",
            )
        own = f"{scope.get('scheme', 'http')}://{hosts[0]}".lower()
        allowed = self._settings.allow_origins
        if "*" in allowed or all(origin in allowed or origin.lower() == own for origin in origins):
            return None
        return RefusedError(
            HTTPStatus.FORBIDDEN,
            "origin_not_allowed",
            f"pages of {origins[0]!r:.200} may not use this server",
            "start the server with --allow-origin ORIGIN",
        )


class KeyGuard:
    """Middleware that refuses requests without the API key, and bodies that are not declared as JSON."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app: Final = app
        self._key: Final = None if settings.api_key is None else settings.api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            await UnreadBodyResponse(refusal)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> RefusedError | None:
        headers = Headers(scope=scope)
        if self._key is not None and scope["path"] not in OPEN_PATHS:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            # The time of the comparison does not tell where the two differ.
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("utf-8"), self._key):
                return RefusedError(
                    HTTPStatus.UNAUTHORIZED,
                    "invalid_api_key",
                    "the API key is missing or wrong",
                    "send it as the header Authorization: Bearer KEY",
                    {"www-authenticate": "Bearer"},
                )
        return content_type_refusal(scope)


def content_type_refusal(scope: Scope) -> RefusedError | None:
    """Why a request is refused whose body may be something other than JSON; None for all others."""
    if scope["method"] not in _WITH_BODY:
        return None
    kind = Headers(scope=scope).get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return None
    return RefusedError(
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        "unsupported_content_type",
        f"the Content-Type is {kind!r:.100}" if kind else "the header Content-Type is missing",
        "send JSON with Content-Type: application/json",
    )
