"""Ctrl-C while an answer is being written: the first ends the answer, a second ends the program."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def cancelling_on_interrupt(cancel: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Within the block, Ctrl-C calls `cancel`; yields a function that says whether that happened.

    A pass over the weights is not broken off in the middle, so the cache stays valid.
    """
    interrupted = False

    def handle(_signal: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True
        cancel()

    if threading.current_thread() is not threading.main_thread():
        yield lambda: interrupted
        return
    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
