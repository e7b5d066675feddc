"""Work in the background while an engine generates nothing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
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


class IdleThread:
    """A thread that does one piece of work, and waits while an answer is generated. It exists while it has work.

    Work that failed is begun again by a later `start`, after a while.

    Args:
        queue: the request queue of the engine.
        work: the work. It calls the function it is given between short steps, which waits, and raises an exception that
            the work lets pass once the engine is closed.
        name: name of the thread.
    """

    def __init__(self, queue: RequestQueue, work: Callable[[Progress], None], name: str) -> None:
        self._queue: Final = queue
        self._work: Final = work
        self._name: Final = name
        self._closing: Final = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_done = False
        self._failures = 0
        self._retry_at = 0.0

    def start(self) -> None:
        """Begin, unless it has begun, has failed a moment ago, or the engine is closed; returns at once."""
        if self._is_done or self._closing.is_set() or time.monotonic() < self._retry_at:
            return
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            # Where no thread can be started, the work is left to a later process.
            with suppress(RuntimeError):
                thread.start()
            self._thread = thread

    def close(self) -> None:
        """Abandon the work, and wait until its current step ends."""
        self._closing.set()
        thread = self._thread
        if thread is not None and thread.is_alive():
            thread.join()

    def _run(self) -> None:
        try:
            self._wait_until_idle()
            self._work(self._pause)
            self._is_done = True
        except Cancelled:
            return
        except (EdgeError, OSError) as error:
            _log.warning("%s failed: %s", self._name, error)
        finally:
            self._retry_at = time.monotonic() + _RETRY_S * 2**self._failures
            self._failures += 1

    @property
    def _is_busy(self) -> bool:
        return bool(self._queue.running or self._queue.waiting)

    def _pause(self, stage: str, fraction: float) -> None:
        """Wait while an answer is generated; called between two steps.

        Raises:
            Cancelled: the engine was closed.
        """
        del stage, fraction
        if self._is_busy or self._closing.is_set():
            self._wait_until_idle()

    def _wait_until_idle(self) -> None:
        """Wait until the engine has generated nothing for a moment.

        Raises:
            Cancelled: the engine was closed.
        """
        idle_s = 0.0
        while idle_s < _IDLE_S:
            if self._closing.wait(_POLL_S):
                raise Cancelled
            idle_s = 0.0 if self._is_busy else idle_s + _POLL_S
