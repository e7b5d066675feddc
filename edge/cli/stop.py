"""`edge-run stop [MODEL]`: unloads models from the memory of running servers and apps."""

from __future__ import annotations

import os
import time
from typing import Annotated, Final

import typer

from ...errors import EdgeError, InputError
from ..service.running_servers import API_KEY_VARIABLE, RunningServer, ask, ask_for_models, running_servers
from ..terminal.output import write_json, write_line
from .ps import warn_of_problems
from .shared_options import AsJson, Debug

_WAIT_S: Final = 2.0
"""Seconds to wait for the end of unloading, which answers in progress delay."""
_POLL_S: Final = 0.05


def stop(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A name that edge-run ps lists.", show_default="all")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001  main reads it
) -> None:
    """Unload a model from the memory of running servers and apps; they go on, and load it again for the next request.

    Answers in progress are finished first.

    Example: edge-run stop my-model
    """
    servers = running_servers()
    warn_of_problems(servers)
    wanted = None if model is None else model.removesuffix(":latest")
    loaded = [(server, str(each["name"])) for server in servers for each in server.models]
    chosen = [(server, name) for server, name in loaded if wanted in (None, name)]
    if wanted is not None and not chosen:
        names = ", ".join(name for _, name in loaded)
        raise InputError(f"{model} is not in memory", f"in memory: {names}" if names else "edge-run ps lists what is")
    stopped = [{"model": name, "url": server.url, "unloaded": _unload(server, name)} for server, name in chosen]
    if as_json:
        write_json({"stopped": stopped})
        return
    for each in stopped:
        how = "unloaded" if each["unloaded"] else "is in use, and will be unloaded when its answers have ended"
        write_line(f"{each['model']}: {how} ({each['url']})")
    if not chosen:
        write_line("no model is in memory")


def _unload(server: RunningServer, name: str) -> bool:
    """Ask a server to unload a model, and wait for it a moment; returns whether it is gone.

    Raises:
        EdgeError: the server refuses, or does not answer.
    """
    body = {"model": name, "keep_alive": 0, "stream": False}
    try:
        ask(f"{server.url}/api/generate", body, os.environ.get(API_KEY_VARIABLE))
    except (OSError, ValueError) as error:
        raise EdgeError(f"{server.url} does not unload {name}: {error}", "end that server, or try again") from error
    until = time.monotonic() + _WAIT_S
    while any(each["name"] == name for each in server.models) and time.monotonic() < until:
        time.sleep(_POLL_S)
        ask_for_models(server)
    return all(each["name"] != name for each in server.models)
