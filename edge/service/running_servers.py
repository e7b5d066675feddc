"""Servers and apps of this user that run: how they are found, and what they have in memory."""

from __future__ import annotations

import json
import logging
import os
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final
from urllib.error import HTTPError

import msgspec

from ...models.atomic import write_atomically
from ...models.file_system import locked, remove
from ...models.user_folders import data_folder, make_private_folder

API_KEY_VARIABLE: Final = "EDGERUN_API_KEY"
_ANSWER_S: Final = 5.0
_WAIT_S: Final = 1.0
_MAX_BYTES: Final = 8 << 20
_UNAUTHORIZED: Final = 401
_log: Final = logging.getLogger(__name__)


class RunningServer(msgspec.Struct, kw_only=True):
    """A running server or app."""

    url: str
    process: int
    models: list[dict[str, Any]] = []
    """The models in memory, as in the answer of Ollama's `/api/ps`."""
    problem: str | None = None
    """Why it does not say which models are in memory; None if it does."""


@contextmanager
def announced(url: str) -> Iterator[None]:
    """Let other processes of this user find the server of this one during the block.

    The file is readable by its owner alone, and has no secrets. Its lock ends with the process, so that the file of a
    process that was killed is not taken for a running server.
    """
    with ExitStack() as stack:
        try:
            make_private_folder(data_folder())
            file = data_folder() / f"server-{os.getpid()}.json"
            stack.enter_context(locked(file.with_suffix(".lock"), _WAIT_S, remove=True))
            write_atomically(file, msgspec.json.encode({"url": url, "process": os.getpid()}), private=True)
            stack.callback(remove, file)
        except OSError as error:  # a folder that cannot be written; the server works without
            _log.warning("edge-run ps will not find this server: %s", error)
        yield


def running_servers() -> list[RunningServer]:
    """The servers and apps of this user that run, with the models that they have in memory."""
    found = []
    for file in sorted(data_folder().glob("server-*.json")):
        with suppress(OSError, msgspec.DecodeError):
            try:
                with locked(file.with_suffix(".lock"), 0.0, remove=True):
                    file.unlink(missing_ok=True)  # its process was killed
            except TimeoutError:
                found.append(msgspec.json.decode(file.read_bytes(), type=RunningServer))
    for server in found:
        ask_for_models(server)
    return found


def ask_for_models(server: RunningServer) -> None:
    """Ask a server which models are in memory, or note why it does not say so."""
    server.models, server.problem = [], None
    try:
        answer = ask(f"{server.url}/api/ps", key=os.environ.get(API_KEY_VARIABLE))
        server.models = msgspec.convert(answer["models"], list[dict[str, Any]])
    except (OSError, ValueError, KeyError, TypeError) as error:
        server.problem = f"it does not answer: {error}"
        if isinstance(error, HTTPError) and error.code == _UNAUTHORIZED:
            server.problem = f"it has an API key; give it in the environment variable {API_KEY_VARIABLE}"


def ask(url: str, body: Mapping[str, Any] | None = None, key: str | None = None) -> Any:
    """The JSON value that a server of this machine answers with.

    Args:
        url: what is asked for.
        body: sent as JSON with POST; None for GET.
        key: sent as a bearer token.

    Raises:
        OSError: it does not answer, or refuses.
        ValueError: something else answers.
    """
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)  # noqa: S310  what this user's own processes have written
    # Proxies that the environment names are for other hosts.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_ANSWER_S) as response:
        return json.loads(response.read(_MAX_BYTES))
