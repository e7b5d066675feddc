"""How long the nodes of a graph take, from the profile that ONNX Runtime writes of a session."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

_NODE_ENDING: Final = "_kernel_time"
_RUN: Final = "model_run"


class _Event(NamedTuple):
    name: str
    seconds: float


def read_passes(profile: Path) -> list[dict[str, float]]:
    """Seconds by node, for each pass in the order in which they were run.

    The profiler's own work on a node is in its time: 5 to 10 microseconds, the same whatever the node computes.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no profile.
    """
    passes: list[dict[str, float]] = []
    nodes: dict[str, float] = {}
    # A kilobyte is noted of each node, of which two numbers are kept as the file is read.
    for event in json.loads(profile.read_text(encoding="utf-8"), object_hook=_event):
        if not isinstance(event, _Event):
            continue
        if event.name.endswith(_NODE_ENDING):
            nodes[event.name.removesuffix(_NODE_ENDING)] = event.seconds
        elif event.name == _RUN:
            passes.append(nodes)
            nodes = {}
    return passes


def _event(fields: dict[str, Any]) -> _Event | None:
    """An event; None for what is noted inside of one."""
    if "cat" not in fields:
        return None
    return _Event(str(fields["name"]), float(fields["dur"]) * 1e-6)
