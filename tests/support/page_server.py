"""The files of the app's page on a port, with a test's own document in place of index.html."""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from edgerun.edge.app.page_files import content_security_policy

PAGE = Path(__file__).resolve().parents[2] / "edge" / "app" / "page"
_START = '<script type="module" src="/page/app.js"></script>'
"""What starts the app in index.html."""
_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".svg": "image/svg+xml",
}


def _digest(script: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() + "'"


@contextmanager
def page_server(script: str, *, body: str = '<main id="root"></main>') -> Iterator[str]:
    """Serve a document that runs `script`, a module, under the app's Content-Security-Policy.

    Args:
        script: the text of a module; it can import everything that the page's modules can.
        body: the document's body.

    Yields:
        The address of the document.
    """
    index = (PAGE / "index.html").read_text(encoding="utf-8")
    head = index.partition("<head>")[2].partition("</head>")[0]
    document = (
        f'<!doctype html><html lang="en"><head>{head.replace(_START, "")}'
        f'<script type="module">{script}</script></head><body>{body}</body></html>'
    )
    policy = content_security_policy(document.encode())
    policy = policy.replace("script-src 'self'", f"script-src 'self' {_digest(script)}")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            file = PAGE / path.removeprefix("/page/")
            if path == "/":
                self._send(200, "text/html", document.encode())
            elif path.startswith("/page/") and file.suffix in _TYPES and file.is_file():
                self._send(200, _TYPES[file.suffix], file.read_bytes())
            else:
                self._send(404, "text/plain", b"")

        def _send(self, status: int, kind: str, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Security-Policy", policy)
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            """Tests print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
