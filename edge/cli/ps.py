"""`edge-run ps` and `edge-run stop`: the models that running servers and apps have in memory."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.table import Table

from ...errors import EdgeError, InputError
from ...models.user_text import format_bytes
from ..service.running_servers import ask, running_servers
from ..terminal.output import SafeConsole, write_error, write_json, write_line
from .shared_options import AsJson, Debug


def ps(
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001  main reads it
) -> None:
    """List the models that running servers and apps have in memory: their size, context, and how long they stay.

    These are the edge-run serve and edge-run app of this user on this machine. One that has an API key is asked with
    the key in the environment variable EDGERUN_API_KEY.

    Example: edge-run ps
    """
    servers = running_servers()
    if as_json:
        write_json({"servers": servers})
        return
    table = Table("model", "size", "context", "until", "server", box=None, pad_edge=False)
    for server in servers:
        if server["problem"] is not None:
            write_error(f"edge-run: {server['url']}: {server['problem']}")
        for model in server["models"]:
            context, size = str(model["context_length"] or "-"), format_bytes(model["size"])
            table.add_row(model["name"], size, context, _time_left(model["expires_at"]), server["url"])
    if table.row_count:
        SafeConsole().print(table)
    else:
        write_line("no model is in memory" if servers else "no server runs; to start one: edge-run serve or app")


def stop(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A name that edge-run ps lists.", show_default="all")
    ] = None,
    debug: Debug = False,  # noqa: ARG001  main reads it
) -> None:
    """Unload a model from the memory of running servers and apps, when the answers in progress have ended.

    They load it again for the next request.

    Example: edge-run stop my-model
    """
    names = [(server["url"], each["name"]) for server in running_servers() for each in server["models"]]
    chosen = [(url, name) for url, name in names if model is None or name == model.removesuffix(":latest")]
    if not chosen:
        what = "no model is in memory" if model is None else f"{model} is not in memory"
        raise InputError(what, "edge-run ps lists what is, and which servers do not tell")
    for url, name in chosen:
        try:
            ask(f"{url}/api/generate", {"model": name, "keep_alive": 0, "stream": False})
        except (OSError, ValueError) as error:
            raise EdgeError(f"{url} does not unload {name}: {error}", "end that server, or try again") from error
        write_line(f"{name} is unloaded once no answer uses it ({url})")


def _time_left(expires_at: str) -> str:
    """How long a model stays in memory if nobody uses it again."""
    left = datetime.fromisoformat(expires_at) - datetime.now(UTC)
    # Ollama's API has a date in the 24th century for models that stay.
    return "forever" if left.days > 10_000 else f"{max(left.total_seconds(), 0) / 60:.0f} min"
