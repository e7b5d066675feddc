"""Who may use the app: one-time tokens, the session cookie, and the requests that have it.

Every user and program of this machine can reach the app's port, and so can every web page that the user opens. A
conversation is shown to the browser alone that was opened with a token of `edge-run app`. A second `edge-run app` of
the same user finds the first one by a lock and a file.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import threading
import time
from contextlib import ExitStack, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import Request, cookie_parser
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import Scope

from ...errors import EdgeError
from ...models.atomic import write_atomically
from ...models.file_system import locked, remove
from ...models.user_folders import make_private_folder
from ..server.asgi_app import content_type_refusal
from ..server.http_protocol import JsonResponse, RefusedError, UnreadBodyResponse
from ..service.running_servers import ask
from .page_files import PASSAGE, entrance_page

TOKEN_LIFE_S: Final = 300.0
"""Seconds for which a one-time token is valid."""
SESSION_LIFE_S: Final = 30 * 24 * 3600
"""Seconds for which a browser that has opened the app may come back."""
OPEN_PATH: Final = "/open"
_SECRET_BYTES: Final = 32
_ENDPOINT_FILE: Final = "app.json"
_START_S: Final = 30.0
"""Seconds within which an app that has the lock has to answer."""
_POLL_S: Final = 0.05


def session_secret(folder: Path) -> bytes:
    """The secret that signs sessions, which is made at the first start and kept, so that sessions outlast the app.

    Raises:
        OSError: it cannot be read or written.
    """
    path = folder / "app.key"
    secret = path.read_bytes() if path.exists() else b""
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
        self.ending = False
        """Whether the app is ending, and lets nobody in any more."""
        self._secret: Final = secret
        self._lock: Final = threading.Lock()
        self._tokens: dict[str, float] = {}

    def new_token(self) -> str:
        """A token that opens the app once, within a few minutes."""
        token = secrets.token_urlsafe(24)
        now = time.monotonic()
        with self._lock:
            self._tokens = {old: until for old, until in self._tokens.items() if until >= now}
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
        """Whether the value of a cookie is a session's."""
        until, _, signature = value.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._signature(until).encode()):
            return False
        return int(until.partition(".")[0]) > time.time()

    def has_session(self, scope: Scope) -> bool:
        """Whether a request has the cookie of a session."""
        cookies = cookie_parser(Headers(scope=scope).get("cookie", ""))
        return self.is_session(cookies.get(self.cookie_name, ""))

    async def enter(self, request: Request) -> Response:
        """Let a browser in that has a token, or has been let in before: a one-time token becomes a session."""
        if not self.take_token(request.query_params.get("token", "")):
            if self.has_session(request.scope):
                return RedirectResponse("/", HTTPStatus.SEE_OTHER)
            return entrance_page("This link has been used already, or is more than a few minutes old.")
        foreign = request.headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}
        response = HTMLResponse(PASSAGE) if foreign else RedirectResponse("/", HTTPStatus.SEE_OTHER)
        session = self.new_session()
        response.set_cookie(self.cookie_name, session, max_age=SESSION_LIFE_S, httponly=True, samesite="strict")
        return response

    async def give_token(self, request: Request) -> Response:
        """A token for another process of the same user."""
        _, _, given = request.headers.get("authorization", "").partition(" ")
        if not hmac.compare_digest(given.encode("utf-8", "replace"), self.owner_key.encode()):
            refusal = RefusedError(HTTPStatus.UNAUTHORIZED, "invalid_api_key", "the key is missing or wrong")
        elif self.ending:
            refusal = RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "shutting_down", "the app is ending")
        else:
            return JsonResponse({"token": self.new_token()})
        return UnreadBodyResponse(refusal, request.scope)

    def _signature(self, text: str) -> str:
        return hmac.new(self._secret, text.encode("utf-8", "replace"), hashlib.sha256).hexdigest()


def session_refusal(access: AppAccess, scope: Scope) -> RefusedError | Response | None:
    """Why a request of another site, without a session or with a body that is not JSON is refused; None for others."""
    is_api = scope["path"].startswith("/api/")
    # Servers at other ports of this machine are of the same site, so their pages' requests have the cookie.
    if is_api and Headers(scope=scope).get("sec-fetch-site", "none") not in {"same-origin", "none"}:
        return RefusedError(HTTPStatus.FORBIDDEN, "origin_not_allowed", "pages of another origin may not use the app")
    if scope["path"] == OPEN_PATH:
        return None
    if access.has_session(scope):
        return content_type_refusal(scope)
    if scope["method"] == "GET" and not is_api:
        return entrance_page("", HTTPStatus.UNAUTHORIZED)
    return RefusedError(HTTPStatus.UNAUTHORIZED, "no_session", "this browser has not been let in", "run edge-run app")


def announce(folder: Path, port: int, access: AppAccess) -> None:
    """Let other processes of this user find the app of this one; the file is readable by its owner alone."""
    url = f"http://127.0.0.1:{port}"
    text = json.dumps({"url": url, "port": port, "owner_key": access.owner_key, "process": os.getpid()})
    write_atomically(folder / _ENDPOINT_FILE, text.encode(), private=True)


def open_url(port: int, token: str) -> str:
    """The address that opens an app once."""
    return f"http://127.0.0.1:{port}{OPEN_PATH}?token={token}"


def join_running_app(stack: ExitStack, folder: Path) -> str | None:
    """Become the only app of this user until `stack` is closed, or find the one that runs.

    Returns:
        None if this process is the app now, else a new address that opens the other one.

    Raises:
        EdgeError: another app runs, and does not answer.
        OSError: the folder cannot be written.
    """
    make_private_folder(folder)
    endpoint, until = folder / _ENDPOINT_FILE, time.monotonic() + _START_S
    while True:
        with suppress(TimeoutError):
            stack.enter_context(locked(folder / "app.lock", 0.0))
            # What a killed app has left names a port that may be another program's now.
            endpoint.unlink(missing_ok=True)
            stack.callback(remove, endpoint)
            return None
        # An app that has just started has no file yet, and one that is ending gives out no tokens.
        with suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(endpoint.read_text(encoding="utf-8"))
            answer = ask(f"{found['url']}{OPEN_PATH}", {}, key=str(found["owner_key"]))
            return open_url(int(found["port"]), str(answer["token"]))
        if time.monotonic() >= until:
            raise EdgeError("edge-run app runs already, and does not answer", f"end it; its folder is {folder}")
        time.sleep(_POLL_S)
