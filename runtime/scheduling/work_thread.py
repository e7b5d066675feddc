"""A thread that does pieces of work one after the other, beside the target's passes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final


class WorkThread:
    """A thread of an engine that does what is submitted, in order. It starts with the first work.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name: Final = name
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None]) -> None:
        """Do some work, which raises nothing, when all earlier work is done; returns at once.

        Raises:
            RuntimeError: no thread can be started.
        """
        if self._thread is None:
            thread = threading.Thread(target=_work_off, args=(self._work,), name=self._name, daemon=True)
            thread.start()
            self._thread = thread
        self._work.put(work)

    def close(self) -> None:
        """End the thread after the work that was submitted; calling it again does nothing."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._work.put(None)
            thread.join()

    def __del__(self) -> None:
        # The thread refers to the queue alone, so an engine that nobody closed can be freed, which ends the thread.
        self._work.put(None)


def _work_off(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := queue.get()) is not None:
        work()
        del work  # while waiting, it would keep a model alive
