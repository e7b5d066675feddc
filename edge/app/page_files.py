"""The files of the page, and the headers that say what the page may do."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from http import HTTPStatus
from pathlib import Path
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PAGE_FOLDER: Final = Path(__file__).parent / "page"
_INDEX: Final = (PAGE_FOLDER / "index.html").read_bytes()
_IMPORT_MAP: Final = hashlib.sha256(re.findall(rb'<script type="importmap">(.*?)</script>', _INDEX, re.DOTALL)[0])
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
"""Content types by suffix. The system's own table, which Windows keeps in its registry, may call scripts plain text."""


CONTENT_SECURITY_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        f"script-src 'self' 'sha256-{base64.b64encode(_IMPORT_MAP.digest()).decode()}'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "font-src 'self'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
"""What a page may load: its own files, with the import map that is in the HTML, and nothing from anywhere else."""


def with_page_headers(app: ASGIApp) -> ASGIApp:
    """Middleware that adds the headers that protect the page, as far as a response does not set them itself."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await app(scope, receive, with_headers)

    return answer


_HEADERS: Final = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


async def index_page(_request: Request) -> Response:
    """The page."""
    return HTMLResponse(_INDEX)


class PageFiles(StaticFiles):
    """The files of the page. The browser keeps them, and asks whether they have changed."""

    def __init__(self) -> None:
        super().__init__(directory=PAGE_FOLDER)

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Return a file, or that it has not changed."""
        response = await super().get_response(path, scope)
        response.headers["cache-control"] = "no-cache"
        if "content-type" in response.headers:
            response.headers["content-type"] = _TYPES.get(Path(path).suffix, "application/octet-stream")
        return response


def entrance_page(problem: str, status: int = HTTPStatus.FORBIDDEN) -> Response:
    """A page that tells how to get in, for browsers that have no session.

    Args:
        problem: what was wrong with how it was tried.
        status: the HTTP status.
    """
    text = f"<p>{html.escape(problem)}</p>" if problem else ""
    return HTMLResponse(_ENTRANCE.format(problem=text), status)


PASSAGE: Final = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=/"><title>edge-run</title></head>
<body><p><a href="/">Open edge-run</a></p></body>
</html>
"""
"""A page that goes on to the app by itself.

A browser that follows a link of another site, such as a terminal in a web page, sends no SameSite=Strict cookies with
the requests that the link is redirected to; it does with the requests of a page of the app.
"""
_ENTRANCE: Final = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>edge-run</title></head>
<body>
<h1>edge-run</h1>
{problem}
<p>To open the app in this browser, run this command in a terminal and follow the link that it prints:</p>
<pre>edge-run app</pre>
<p>If the app has been opened in this browser before, <a href="/">go on to it</a>.</p>
</body>
</html>
"""
