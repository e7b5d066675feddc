"""A test server that answers edge-run's requests over HTTP like the Hugging Face Hub.

It serves listings with digests, files (large ones behind a redirect, with ranges), and the hub's error answers
(https://huggingface.co/docs/hub/api; the headers are those that the hub library reads).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import huggingface_hub.utils
import pytest
from huggingface_hub import constants

LARGE_FROM = 4096
"""Size in bytes from which a file is stored outside git."""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_oid(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()  # noqa: S324  as git does


@dataclass
class Repo:
    commits: dict[str, Mapping[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    token: str = ""
    """Token that is required to read it; empty for none."""
    gated: bool = False
    tags: tuple[str, ...] = ("onnx", "text-generation")
    downloads: int = 0

    def put(self, files: Mapping[str, bytes], ref: str = "main") -> str:
        """Commit files, set a branch to the commit and return it."""
        commit = hashlib.sha1(json.dumps([len(self.commits), sorted(files)]).encode()).hexdigest()  # noqa: S324
        self.commits[commit] = dict(files)
        self.refs[ref] = commit
        return commit


@dataclass(frozen=True)
class Seen:
    """A request that the server received."""

    method: str
    path: str
    range: str | None
    token: str | None


@dataclass
class Faults:
    """Faults to simulate, for requests whose path contains a text."""

    status: dict[str, int] = field(default_factory=dict)
    """Status of the answer."""
    cut: dict[str, int] = field(default_factory=dict)
    """Number of bytes of the body after which the connection ends, once."""
    stall: dict[str, int] = field(default_factory=dict)
    """Number of bytes after which the answer waits for `go_on`."""
    flip: set[str] = field(default_factory=set)
    """Change the last byte."""
    no_ranges: bool = False
    html: bool = False
    """Answer with an HTML page, as a network log-in does."""
    change: Callable[[dict[str, Any]], None] = lambda _: None
    """Changes a listing before it is sent."""
    go_on: threading.Event = field(default_factory=threading.Event)


class HubServer:
    """Serves repositories on this machine, in a thread, until the `with` block ends."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.seen: list[Seen] = []
        self.faults = Faults()
        handler = type("Handler", (_Handler,), {"server_hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def port(self) -> int:
        return self._server.server_port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def repo(self, name: str, files: Mapping[str, bytes]) -> Repo:
        self.repos[name] = Repo()
        self.repos[name].put(files)
        return self.repos[name]

    def bodies(self) -> list[str]:
        """Return the paths of the requested files, in order."""
        return [seen.path.split("/resolve/")[1].split("/", 1)[1] for seen in self.seen if "/resolve/" in seen.path]

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.faults.go_on.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # with it, a body waits 40 ms for the acknowledgement of its headers
    server_hub: HubServer

    def log_message(self, *_: object) -> None:
        return

    def do_GET(self) -> None:
        self._answer(head=False)

    def do_HEAD(self) -> None:
        self._answer(head=True)

    def _answer(self, *, head: bool) -> None:
        hub, path = self.server_hub, unquote(urlsplit(self.path).path)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        hub.seen.append(Seen(self.command, path, self.headers.get("Range"), token))
        for text, status in hub.faults.status.items():
            if text in path:
                return self._send(status, b"", {}, head)
        if hub.faults.html:
            return self._send(200, b"<html>Please log in to this network</html>", {"Content-Type": "text/html"}, head)
        if path == "/api/models":
            return self._search(parse_qs(urlsplit(self.path).query), head)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            return self._model(match[1], match[2] or "main", token, head)
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._resolve(match[1], match[2], match[3], token, head)
        if match := re.fullmatch(r"/cdn/([0-9a-f]{64})/(.*)", path):
            bodies = [data for repo in hub.repos.values() for files in repo.commits.values() for data in files.values()]
            found = [data for data in bodies if sha256(data) == match[1]]
            return self._body(found[0], {"ETag": f'"{match[1]}"'}, head, match[2])
        return self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, head)

    def _files(self, name: str, revision: str, token: str | None, head: bool) -> tuple[str, Mapping[str, bytes]] | None:
        """Return the commit and files of a revision; None if access was refused."""
        repo = self.server_hub.repos.get(name)
        if repo is None or (repo.token and token != repo.token):
            self._send(401 if token is None else 404, b"{}", {"X-Error-Code": "RepoNotFound"}, head)
            return None
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, head)
            return None
        return commit, repo.commits[commit]

    def _model(self, name: str, revision: str, token: str | None, head: bool) -> None:
        if (found := self._files(name, revision, token, head)) is None:
            return
        commit, files = found
        siblings = []
        for path, data in files.items():
            entry = {"rfilename": path, "size": len(data), "blobId": git_oid(data)}
            if len(data) >= LARGE_FROM:
                entry |= {
                    "blobId": git_oid(b"pointer" + data),
                    "lfs": {"sha256": sha256(data), "size": len(data), "pointerSize": 134},
                }
            siblings.append(entry)
        info: dict[str, Any] = {
            "id": name,
            "modelId": name,
            "sha": commit,
            "private": False,
            "tags": [],
            "siblings": siblings,
        }
        self.server_hub.faults.change(info)
        self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"}, head)

    def _search(self, query: Mapping[str, list[str]], head: bool) -> None:
        """Answer with the repositories whose names contain all words of `search` and that have the tags of `filter`."""
        words = query.get("search", [""])[0].lower().split()
        found = [
            {
                "id": name,
                "downloads": repo.downloads,
                "usedStorage": sum(map(len, repo.commits[repo.refs["main"]].values())),
            }
            for name, repo in self.server_hub.repos.items()
            if all(word in name.lower() for word in words) and set(query.get("filter", [])) <= set(repo.tags)
        ]
        if query.get("sort") == ["downloads"]:
            found.sort(key=lambda each: -int(each["downloads"]))
        body = json.dumps(found[: int(query.get("limit", ["1000"])[0])]).encode()
        self._send(200, body, {"Content-Type": "application/json"}, head)

    def _resolve(self, name: str, revision: str, path: str, token: str | None, head: bool) -> None:
        if (found := self._files(name, revision, token, head)) is None:
            return None
        commit, files = found
        if self.server_hub.repos[name].gated and token is None:
            return self._send(403, b"", {"X-Error-Code": "GatedRepo", "X-Repo-Commit": commit}, head)
        if path not in files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, head)
        data = files[path]
        if len(data) < LARGE_FROM:
            return self._body(data, {"X-Repo-Commit": commit, "ETag": f'"{git_oid(data)}"'}, head, path)
        headers = {
            "X-Repo-Commit": commit,
            "X-Linked-Etag": f'"{sha256(data)}"',
            "X-Linked-Size": str(len(data)),
            # Another host, like the hub's: the library sends no token there.
            "Location": f"http://localhost:{self.server_hub.port}/cdn/{sha256(data)}/{path}",
        }
        return self._send(302, b"", headers, head)

    def _body(self, data: bytes, headers: Mapping[str, str], head: bool, path: str) -> None:
        faults = self.server_hub.faults
        if any(text in path for text in faults.flip):
            data = data[:-1] + bytes([data[-1] ^ 1])
        start = 0
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        ranged = match is not None and not faults.no_ranges
        if match is not None and ranged:
            start = int(match[1])
            if start >= len(data):
                return self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"}, head)
            headers = {**headers, "Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        limits = [limit for text, limit in {**faults.cut, **faults.stall}.items() if text in path]
        for text in [text for text in faults.cut if text in path]:
            del faults.cut[text]
        stalls = any(text in path for text in faults.stall)
        return self._send(206 if ranged else 200, data[start:], headers, head, min(limits, default=None), stalls=stalls)

    def _send(
        self,
        status: int,
        body: bytes,
        headers: Mapping[str, str],
        head: bool,
        limit: int | None = None,
        *,
        stalls: bool = False,
    ) -> None:
        self.send_response(status)
        for name, value in {"Accept-Ranges": "bytes", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if head:
            return
        self.wfile.write(body if limit is None else body[:limit])
        if limit is not None and limit < len(body):
            self.wfile.flush()
            if stalls:
                self.server_hub.faults.go_on.wait(60)
            self.close_connection = True


def files_of(folder: Path, below: str = "") -> dict[str, bytes]:
    """Return the files of a folder by path in a repository, below the prefix `below`."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {below + path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


_OF_THE_USER = ("HF_", "HUGGING", "TRANSFORMERS_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
"""Beginnings of the names of variables, in either case."""


@contextmanager
def own_hub(folder: Path) -> Iterator[HubServer]:
    """Run a test hub server instead of the real hub, with `folder` as HF_HOME and without a log-in."""
    with HubServer() as hub, pytest.MonkeyPatch.context() as patch:
        for name in [each for each in os.environ if each.upper().startswith(_OF_THE_USER)]:
            patch.delenv(name)
        patch.setenv("HF_HUB_OFFLINE", "0")  # set, so that the value that --offline sets is restored
        patch.setenv("HF_HOME", str(folder))
        patch.setenv("HF_ENDPOINT", hub.url)
        # The library reads this from the environment when it is imported.
        patch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
        yield hub
        # The library keeps connections open until Python ends; the name is that since release 1.0, or the older one.
        (getattr(huggingface_hub.utils, "close_session", None) or huggingface_hub.utils.reset_sessions)()


def partial_files(folder: Path) -> list[Path]:
    """The files of downloads that are not complete, below HF_HOME; folders may go away meanwhile."""
    # `walk` goes on where a folder that it has listed is gone; `rglob` does not.
    walked = ((Path(below), names) for below, _, names in os.walk(folder))
    return [below / name for below, names in walked if below.name == "partial" for name in names]
