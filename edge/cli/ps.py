"""`edge-run ps`: lists the models that running servers and apps have in memory."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from rich.table import Table

from ...models.user_text import format_bytes
from ..service.running_servers import RunningServer, running_servers
from ..terminal.output import SafeConsole, write_error, write_json, write_line
from .shared_options import AsJson, Debug

_FOREVER_S: Final = 50 * 365 * 24 * 3600
"""Seconds from which a model stays in memory for good: Ollama's API has a date for that."""
_MINUTES_FROM_S: Final = 120


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
        write_json({"servers": msgspec.to_builtins(servers)})
        return
    warn_of_problems(servers)
    loaded = [(server, model) for server in servers for model in server.models]
    if not loaded:
        write_line("no model is in memory" if servers else "no server runs; to start one: edge-run serve or app")
        return
    table = Table("model", "size", "context", "until", "server", box=None, pad_edge=False)
    for server, model in loaded:
        context = str(model.get("context_length") or "-")
        table.add_row(str(model["name"]), format_bytes(model["size"]), context, _left(model), server.url)
    SafeConsole().print(table)


def warn_of_problems(servers: list[RunningServer]) -> None:
    """Say which servers do not tell their models, and why."""
    for server in servers:
        if server.problem is not None:
            write_error(f"edge-run: {server.url}: {server.problem}")


def _left(model: dict[str, Any]) -> str:
    """How long a model stays in memory if nobody uses it again."""
    left_s = (datetime.fromisoformat(model["expires_at"]) - datetime.now(UTC)).total_seconds()
    if left_s > _FOREVER_S:
        return "forever"
    return f"{max(left_s, 0):.0f} s" if left_s < _MINUTES_FROM_S else f"{left_s / 60:.0f} min"
