"""The time that an engine spends measuring its model, and the progress of that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...models.progress import Progress, silent


class MeasuringTime:
    """Adds up the seconds of measurements that an answer waits for, and reports their progress.

    Args:
        progress: receives the stage and the fraction that is done.
    """

    def __init__(self, progress: Progress = silent) -> None:
        self._progress = progress
        self.seconds = 0.0
        """Seconds that measurements have taken so far."""

    @contextmanager
    def stage(self, name: str) -> Iterator[Callable[[float], None]]:
        """Count the time of the block; yields a function that reports the fraction of it that is done, 0 to 1."""
        started = time.perf_counter()
        self._progress(name, 0.0)
        try:
            yield lambda fraction: self._progress(name, fraction)
            self._progress(name, 1.0)
        finally:
            self.seconds += time.perf_counter() - started
