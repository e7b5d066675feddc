"""The files of the app's page on a port, with a test's own document in place of index.html."""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Mount, Route

from edgerun.edge.app.page_files import CONTENT_SECURITY_POLICY, PAGE_FOLDER, PageFiles
from edgerun.edge.server.uvicorn_server import bound_socket

_START = '<script type="module" src="/page/app.js"></script>'
"""What starts the app in index.html."""


@contextmanager
def page_server(script: str, *, body: str = '<main id="root"></main>') -> Iterator[str]:
    """Serve a document that runs `script`, a module, under the app's Content-Security-Policy.

    Args:
        script: the text of a module; it can import everything that the page's modules can.
        body: the document's body.

    Yields:
        The address of the document.
    """
    index = (PAGE_FOLDER / "index.html").read_text(encoding="utf-8")
    head = index.partition("<head>")[2].partition("</head>")[0]
    document = (
        f'<!doctype html><html lang="en"><head>{head.replace(_START, "")}'
        f'<script type="module">{script}</script></head><body>{body}</body></html>'
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = CONTENT_SECURITY_POLICY.replace("script-src 'self'", f"script-src 'self' 'sha256-{digest}'")

    async def page(_request: Request) -> HTMLResponse:
        return HTMLResponse(document, headers={"Content-Security-Policy": policy})

    app = Starlette(routes=[Route("/", page), Mount("/page", PageFiles())])
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    listening = bound_socket("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()
