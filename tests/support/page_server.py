"""The files of the app's page on a port, with a test's own document in place of index.html."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "edge" / "app" / "page"
_VENDOR = "/page/vendor/"
IMPORTS = {
    "edgerun/preact": "/page/preact.js",
    "preact": f"{_VENDOR}preact/preact.mjs",
    "preact/hooks": f"{_VENDOR}preact/hooks.mjs",
    "htm": f"{_VENDOR}htm/htm.mjs",
    "marked": f"{_VENDOR}marked/marked.esm.js",
    "dompurify": f"{_VENDOR}dompurify/purify.es.mjs",
    "highlight.js/core": f"{_VENDOR}highlight.js/core.min.js",
    "highlight.js/languages/": f"{_VENDOR}highlight.js/languages/",
    "temml": f"{_VENDOR}temml/temml.mjs",
}
"""Addresses of the libraries, as index.html maps them."""
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
    import_map = json.dumps({"imports": IMPORTS})
    document = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>test</title>'
        '<link rel="icon" href="data:,"><link rel="stylesheet" href="/page/style.css">'
        '<link rel="stylesheet" href="/page/markdown.css">'
        f'<script type="importmap">{import_map}</script><script type="module">{script}</script></head>'
        f"<body>{body}</body></html>"
    )
    policy = (
        f"default-src 'none'; script-src 'self' {_digest(import_map)} {_digest(script)}; style-src 'self'; "
        "img-src 'self' data:; connect-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            file = PAGE / path.removeprefix("/page/")
            if path == "/":
                self._send(200, "text/html", document.encode())
            elif path.startswith("/page/") and file.suffix in _TYPES and file.is_file():
                self._send(200, _TYPES[file.suffix], file.read_bytes())
            else:
                # A style sheet that is missing is not what these tests are about.
                self._send(404 if not path.endswith(".css") else 200, "text/css", b"")

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
