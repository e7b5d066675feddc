"""Progress of long work: who receives it, and its display in a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Generic, ParamSpec, TypeAlias, TypeVar

from .user_text import on_one_line

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_PATIENCE_S: Final = 0.3
"""Seconds after which a transient display appears."""
LINE_PREFIX: Final = "edge-run: progress: "
"""Beginning of each line of progress where standard error is not a terminal."""
_ESTIMATED_S: Final = 600.0
"""Seconds of a stage by which the time left is estimated; by half a minute, long steps would give none."""
_LINE_S: Final = 15.0
"""Seconds after which a stage that still runs gets another line."""


class shown_by_name(Generic[_Parameters, _Result]):  # noqa: N801  a decorator
    """Decorate a function that is the default of a parameter so that signatures show its name, not its address."""

    def __init__(self, function: Callable[_Parameters, _Result]) -> None:
        self._function = function

    def __call__(self, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        """Call the function."""
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        return self._function.__name__


Progress: TypeAlias = Callable[[str, float], None]
"""Receives the progress of long work: a stage, in a word or two for the user, and its share that is done, 0 to 1."""


@shown_by_name
def silent(stage: str, fraction: float) -> None:
    """Show nothing; the default `Progress`."""


def counted(total: int, progress: Progress, stage: str) -> Callable[[int], None]:
    """Return a function that adds up amounts of work done and reports their share of `total` to `progress`."""
    done = 0

    def report(amount: int) -> None:
        nonlocal done
        done += amount
        progress(stage, min(1.0, done / max(total, 1)))

    return report


class ProgressDisplay:
    """A `Progress` that shows a bar for each stage on standard error.

    Use it in a `with` block. Nothing appears, and no display library is loaded, before the first report.

    Args:
        transient: whether the bars are for the time before an answer: they appear for stages that last, and vanish when
            all of them are done. They are drawn between two reports only, so that they do not disturb a measurement.
        lines: whether stages are written as plain lines where standard error is not a terminal, for work of minutes;
            if not, nothing is written there.
    """

    def __init__(self, *, transient: bool = False, lines: bool = False) -> None:
        self._transient = transient
        self._lines = lines and sys.stderr is not None and not sys.stderr.isatty()
        self._line_times: dict[str, tuple[float, float]] = {}
        """Times of the first and of the last line of each stage."""
        self._started: float | None = None
        """Time of the first report since the display was last closed."""
        self._shown = sys.stderr is not None and sys.stderr.isatty()
        self._bars: Bars | None = None
        self._stages: dict[str, TaskID] = {}

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the display, which begins anew with the next report; bars of a transient one vanish."""
        if self._bars is not None:
            self._bars.stop()
        self._bars = self._started = None
        self._stages.clear()

    def __call__(self, stage: str, fraction: float) -> None:
        """Show that this fraction of a stage is done, 0 to 1. A new stage gets a bar of its own."""
        self._show(stage, fraction, 1.0, f"{fraction:.0%}")

    def show_bytes(self, stage: str, done: int, total: int) -> None:
        """Show the number of bytes of a stage that are done, and of all."""
        self._show(stage, done, total, f"{done / 1e6:.1f} of {total / 1e6:.1f} MB")

    def _show(self, stage: str, done: float, total: float, amount: str) -> None:
        if self._lines:
            self._write_line(stage, amount, done / max(total, 1))
        if not self._shown:
            return
        if self._bars is None:
            if not self._is_due(done, total):
                return
            self._bars = _bars(transient=self._transient)
            self._bars.start()
        if stage not in self._stages:
            self._stages[stage] = self._bars.add_task(on_one_line(stage), total=total, amount=amount)
        self._bars.update(self._stages[stage], completed=done, total=total, amount=amount)
        if self._transient:
            self._bars.refresh()
            if self._bars.finished:
                self.close()

    def _write_line(self, stage: str, amount: str, share: float) -> None:
        """Write a line when a stage begins, and while it lasts."""
        now = time.monotonic()
        begins = stage not in self._line_times
        began, last = self._line_times.get(stage, (now, now))
        if begins or now - last >= _LINE_S:
            self._line_times[stage] = began, now
            left = f", {(now - began) * (1 - share) / share:.0f} s left" if share > 0 else ""
            line = on_one_line(stage if begins else f"{stage}, {amount}{left}")
            print(f"{LINE_PREFIX}{line}", file=sys.stderr, flush=True)  # noqa: T201

    def _is_due(self, done: float, total: float) -> bool:
        """Whether bars have to appear, a transient one only for a stage that lasts."""
        if not self._transient:
            return True
        if done >= total:
            self._started = None
            return False
        now = time.monotonic()
        if self._started is None:
            self._started = now
        return now - self._started >= _PATIENCE_S


def _bars(*, transient: bool) -> Bars:
    from rich import progress  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415

    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.TextColumn("{task.fields[amount]}", justify="right"),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=transient,
        auto_refresh=not transient,
        speed_estimate_period=_ESTIMATED_S,
    )
