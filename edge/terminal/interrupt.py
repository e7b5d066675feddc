"""Ctrl-C during an answer: the first ends the answer, the second the program."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def cancelling_on_interrupt(cancel: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Call `cancel` on the first Ctrl-C within the block; yields a function that tells whether that happened.

    A forward pass that is running is completed, so the cache stays valid.
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
