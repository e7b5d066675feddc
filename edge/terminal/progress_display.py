"""The progress display of every command that works for over a second."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class ProgressDisplay:
    """Shows a bar for each stage of the work on standard error, and nothing where that is not a terminal.

    Use it in a `with` block. It is itself the callback that an export reports its progress to.
    """

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        shown = sys.stderr is not None and sys.stderr.isatty()
        self._bars = Progress(*columns, console=Console(stderr=True), disable=not shown)
        self._stages: dict[str, TaskID] = {}

    def __enter__(self) -> ProgressDisplay:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def __call__(self, stage: str, fraction: float) -> None:
        """Show that this fraction of a stage is done, 0 to 1. A new stage gets a bar of its own."""
        if stage not in self._stages:
            self._stages[stage] = self._bars.add_task(stage, total=1.0)
        self._bars.update(self._stages[stage], completed=fraction)

    def stage(self, name: str) -> Callable[[float], None]:
        """A callback that takes the fraction of this stage that is done."""
        return lambda fraction: self(name, fraction)
