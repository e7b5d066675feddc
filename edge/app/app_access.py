"""Who may use the app: one-time tokens, the session cookie, and the requests that have it.

Every user and program of this machine can reach the app's port, and so can every web page that the user opens. A
conversation is shown to the browser alone that was opened with a token of `edge-run app`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from http import HTTPStatus
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Receive, Scope, Send

from ...models.atomic import write_atomically
from ..server.access_guard import content_type_refusal
from ..server.error_objects import RefusedError, UnreadBodyResponse
from .page_files import entrance_page

TOKEN_LIFE_S: Final = 300.0
"""Seconds for which a one-time token is valid."""
SESSION_LIFE_S: Final = 30 * 24 * 3600
"""Seconds for which a browser that has opened the app may come back."""
OPEN_PATH: Final = "/open"
_MAX_TOKENS: Final = 64
_KEY_FILE: Final = "app.key"
_SECRET_BYTES: Final = 32


def session_secret(folder: Path) -> bytes:
    """The secret that signs sessions, which is made at the first start and kept, so that sessions outlast the app.

    Raises:
        OSError: it cannot be read or written.
    """
    path = folder / _KEY_FILE
    try:
        secret = path.read_bytes()
    except FileNotFoundError:
        secret = b""
    if len(secret) != _SECRET_BYTES:
        secret = secrets.token_bytes(_SECRET_BYTES)
        write_atomically(path, secret, private=True)
    return secret


class AppAccess:
    """One-time tokens and sessions of one running app.

    Args:
        secret: signs the sessions.
        port: port of the app. Cookies of one host are shared by all ports, so the cookie is named by it.
    """

    def __init__(self, secret: bytes, port: int) -> None:
        self.cookie_name: Final = f"edge-run-{port}"
        self.owner_key: Final = secrets.token_urlsafe(32)
        """What another process of the same user shows to get a token."""
        self._secret: Final = secret
        self._lock: Final = threading.Lock()
        self._tokens: Final[dict[str, float]] = {}

    def new_token(self) -> str:
        """A token that opens the app once, within a few minutes."""
        token = secrets.token_urlsafe(24)
        now = time.monotonic()
        with self._lock:
            for old in [old for old, until in self._tokens.items() if until < now]:
                del self._tokens[old]
            while len(self._tokens) >= _MAX_TOKENS:
                del self._tokens[next(iter(self._tokens))]
            self._tokens[token] = now + TOKEN_LIFE_S
        return token

    def take_token(self, token: str) -> bool:
        """Whether a token is valid; from now on it is not."""
        with self._lock:
            return self._tokens.pop(token, 0.0) >= time.monotonic()

    def new_session(self) -> str:
        """The value of a cookie for a new session."""
        until = f"{int(time.time()) + SESSION_LIFE_S}.{secrets.token_urlsafe(9)}"
        return f"{until}.{self._signature(until)}"

    def is_session(self, value: str) -> bool:
        """Whether the value of a cookie is that of a session."""
        until, _, signature = value.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._signature(until).encode()):
            return False
        return int(until.partition(".")[0]) > time.time()

    def has_session(self, scope: Scope) -> bool:
        """Whether a request has the cookie of a session."""
        cookies = cookie_parser(Headers(scope=scope).get("cookie", ""))
        return self.is_session(cookies.get(self.cookie_name, ""))

    def _signature(self, text: str) -> str:
        return hmac.new(self._secret, text.encode("utf-8", "replace"), hashlib.sha256).hexdigest()


class SessionGuard:
    """Middleware that refuses requests without a session, requests of other sites, and bodies that are not JSON."""

    def __init__(self, app: ASGIApp, access: AppAccess) -> None:
        self._app: Final = app
        self._access: Final = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http" or scope["path"] == OPEN_PATH:
            await self._app(scope, receive, send)
            return
        if (refusal := self._refusal(scope)) is None:
            await self._app(scope, receive, send)
        elif scope["method"] == "GET" and not scope["path"].startswith("/api/"):
            await entrance_page("", refusal.status)(scope, receive, send)
        else:
            await UnreadBodyResponse(refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> RefusedError | None:
        headers = Headers(scope=scope)
        # Servers at other ports of this machine are of the same site, so their pages' requests have the cookie.
        if scope["path"].startswith("/api/") and headers.get("sec-fetch-site", "none") not in {"same-origin", "none"}:
            return RefusedError(
                HTTPStatus.FORBIDDEN, "origin_not_allowed", "pages of another origin may not use the app"
            )
        if not self._access.has_session(scope):
            return RefusedError(
                HTTPStatus.UNAUTHORIZED, "no_session", "this browser has not been let in", "run edge-run app"
            )
        return content_type_refusal(scope)
