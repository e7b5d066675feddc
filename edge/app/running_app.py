"""One app a user: the lock and the file by which a second `edge-run app` finds the first."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...errors import EdgeError
from ...models.atomic import write_atomically
from ...models.data_folder import make_private_folder
from ...models.lock import locked
from .app_access import OPEN_PATH, AppAccess

_LOCK_FILE: Final = "app.lock"
_ENDPOINT_FILE: Final = "app.json"
_START_S: Final = 30.0
"""Seconds within which an app that has the lock has to answer."""
_ANSWER_S: Final = 5.0
_POLL_S: Final = 0.05


@dataclass(frozen=True)
class Endpoint:
    """Where an app of this user runs, and what it wants to see before it gives out a token."""

    port: int
    owner_key: str

    def new_token(self) -> str:
        """Ask the app for a one-time token.

        Raises:
            OSError: it does not answer.
            ValueError: something else answers.
        """
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{OPEN_PATH}",
            data=b"{}",
            headers={"Authorization": f"Bearer {self.owner_key}", "Content-Type": "application/json"},
        )
        # Proxies that the environment names are for other hosts.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=_ANSWER_S) as response:
            token = json.loads(response.read(4096))["token"]
        if not isinstance(token, str):
            raise ValueError("the token is not a string")
        return token


@contextmanager
def only_app(folder: Path) -> Iterator[bool]:
    """Within the block, this process is the only app of this user; yields whether it is.

    Raises:
        OSError: the folder cannot be written.
    """
    make_private_folder(folder)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / _LOCK_FILE, 0.0))
        except TimeoutError:
            yield False
            return
        # What a killed app has left names a port that may be another program's now.
        (folder / _ENDPOINT_FILE).unlink(missing_ok=True)
        stack.callback(_remove_endpoint, folder)
        yield True


def _remove_endpoint(folder: Path) -> None:
    with suppress(OSError):
        (folder / _ENDPOINT_FILE).unlink(missing_ok=True)


def announce(folder: Path, port: int, access: AppAccess) -> None:
    """Let other processes of this user find the app of this one; the file is readable by its owner alone."""
    text = json.dumps({"port": port, "owner_key": access.owner_key, "process": os.getpid()})
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
    until = time.monotonic() + _START_S
    while not stack.enter_context(only_app(folder)):
        # An app that has just started has no file yet, and one that is ending gives out no tokens.
        with suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads((folder / _ENDPOINT_FILE).read_text(encoding="utf-8"))
            endpoint = Endpoint(int(found["port"]), str(found["owner_key"]))
            return open_url(endpoint.port, endpoint.new_token())
        if time.monotonic() >= until:
            raise EdgeError("edge-run app runs already, and does not answer", f"end it; its folder is {folder}")
        time.sleep(_POLL_S)
    return None
