"""Servers and apps of this user that run: how they are found, and what they have in memory."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPException
from typing import Any, Final
from urllib.error import HTTPError

from ...models.atomic import write_atomically
from ...models.file_system import locked, remove
from ...models.user_folders import data_folder, make_private_folder

API_KEY_VARIABLE: Final = "EDGERUN_API_KEY"
_ANSWER_S: Final = 5.0


@contextmanager
def announced(url: str) -> Iterator[None]:
    """Let other processes of this user find the server of this one during the block.

    The file is readable by its owner alone, and has no secrets. Its lock ends with the process, so that the file of a
    process that was killed is not taken for a running server.
    """
    file = data_folder() / f"server-{os.getpid()}.json"
    with ExitStack() as stack:
        with suppress(OSError):  # a folder that cannot be written; the server works without
            make_private_folder(file.parent)
            stack.enter_context(locked(file.with_suffix(".lock"), _ANSWER_S, remove=True))
            write_atomically(file, json.dumps({"url": url, "process": os.getpid()}).encode(), private=True)
            stack.callback(remove, file)
        yield


def running_servers() -> list[dict[str, Any]]:
    """The servers of this user that run, and the app, which announces itself (`edge.app.app_access`).

    Returns:
        For each its `url`, its `process`, the `models` in memory as in the answer of Ollama's `/api/ps`, and the
        `problem` if it does not say them, else None.
    """
    found: list[dict[str, Any]] = []
    for file in [*data_folder().glob("app.json"), *sorted(data_folder().glob("server-*.json"))]:
        with suppress(OSError, ValueError, KeyError, TypeError):
            try:
                with locked(file.with_suffix(".lock"), 0.0, remove=True):
                    file.unlink()  # its process was killed
            except TimeoutError:
                read = json.loads(file.read_bytes())
                found.append({"url": read["url"], "process": read["process"], "models": [], "problem": None})
    for server in found:
        try:
            server["models"] = ask(f"{server['url']}/api/ps")["models"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            server["problem"] = f"it does not answer: {error}"
            if isinstance(error, HTTPError) and error.code == HTTPStatus.UNAUTHORIZED:
                server["problem"] = f"it has an API key; give it in the environment variable {API_KEY_VARIABLE}"
    return found


def ask(url: str, body: Mapping[str, Any] | None = None, key: str | None = None) -> Any:
    """The JSON value that a server of this machine answers with.

    Args:
        url: what is asked for.
        body: sent as JSON with POST; None for GET.
        key: sent as a bearer token; by default the API key in the environment, if there is one.

    Raises:
        OSError: it does not answer, or refuses.
        ValueError: something else answers.
    """
    key = key or os.environ.get(API_KEY_VARIABLE, "")
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)  # noqa: S310  what this user's own processes have written
    # Proxies that the environment names are for other hosts.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_ANSWER_S) as response:
            return json.loads(response.read(8 << 20))
    except HTTPException as error:
        raise ValueError(f"it does not speak HTTP: {error!r:.100}") from error
