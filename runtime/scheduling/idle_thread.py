"""Work in the background while an engine generates nothing."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from ...errors import EdgeError
from ...models.progress import Progress
from ..prefill import Cancelled
from .request_queue import RequestQueue

_IDLE_S: Final = 0.5
"""Seconds without an answer after which the engine counts as idle."""
_POLL_S: Final = 0.05
_RETRY_S: Final = 60.0
"""Seconds after a failure before which the work is not begun again; twice as many after each further one."""

_log: Final = logging.getLogger(__name__)


@dataclass(eq=False)
class IdleThread:
    """A thread that does one kind of work, and waits while an answer is generated. It exists while it has work."""

    queue: RequestQueue
    """The request queue of the engine."""
    work: Callable[[Progress], object]
    """The work. It calls the function it is given between short steps, which waits, and raises an exception that the
    work lets pass once the engine is closed."""
    name: str
    """Name of the thread."""
    patience_s: float = math.inf
    """Seconds to wait for an idle engine; then the work is done beside the answers."""
    rest: float | None = None
    """Seconds of rest for each second of processor time that the work took, before it is done again; None for work that
    is done once."""

    def __post_init__(self) -> None:
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_wanted = self._is_working = self._is_done = False
        self._failures = 0
        self._next_at = self._impatient_at = 0.0

    def start(self) -> None:
        """Do the work soon, unless the engine is closed, or the work is done for good; returns at once."""
        with self._lock:
            if self._is_done or self._closing.is_set():
                return
            if not self._is_wanted:
                self._is_wanted, self._impatient_at = True, time.monotonic() + self.patience_s
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                # Where no thread can be started, the work is left to a later call, or to a later process.
                with suppress(RuntimeError):
                    thread.start()
                    self._thread = thread

    def close(self) -> bool:
        """Abandon the work, and wait until its current step ends; returns whether it was not in progress."""
        with self._lock:
            self._closing.set()
            thread = self._thread
        if thread is not None:
            thread.join()
        return not self._is_working

    def _run(self) -> None:
        with suppress(Cancelled):
            while True:
                with self._lock:
                    if not self._is_wanted or self._is_done:
                        self._thread = None
                        return
                self._wait_until_idle(self._next_at)
                self._is_wanted, self._is_working = False, True
                self._impatient_at = time.monotonic() + self.patience_s
                started = time.thread_time()
                try:
                    self.work(self._pause)
                    self._is_done = self.rest is None
                    self._next_at = time.monotonic() + (self.rest or 0) * (time.thread_time() - started)
                except (EdgeError, OSError, MemoryError) as error:
                    _log.warning("%s failed: %s", self.name, error)
                    self._next_at = time.monotonic() + _RETRY_S * 2**self._failures
                    self._failures += 1
                self._is_working = False

    def _pause(self, stage: str, fraction: float) -> None:
        """Wait while an answer is generated; called between two steps.

        Raises:
            Cancelled: the engine was closed.
        """
        del stage, fraction
        if self._is_busy or self._closing.is_set():
            self._wait_until_idle()

    @property
    def _is_busy(self) -> bool:
        return bool(self.queue.running or self.queue.waiting)

    def _wait_until_idle(self, earliest: float = 0.0) -> None:
        """Wait until the engine has generated nothing for a moment, or patience ends, but not before `earliest`.

        Raises:
            Cancelled: the engine was closed.
        """
        idle_s = 0.0
        while (idle_s < _IDLE_S and time.monotonic() < self._impatient_at) or time.monotonic() < earliest:
            if self._closing.wait(_POLL_S):
                raise Cancelled
            idle_s = 0.0 if self._is_busy else idle_s + _POLL_S
        if self._closing.is_set():
            raise Cancelled
