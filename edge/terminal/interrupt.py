"""What Ctrl-C does while something is answered: it ends the answer.

Ctrl-C stays ignored where the parent process ignores it, and a handler that is not written in Python stays too.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeAlias

Handler: TypeAlias = Callable[[int, FrameType | None], Any]


@contextmanager
def cancelling_on_interrupt(cancel: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Call `cancel` on the first Ctrl-C within the block; yields a function that tells whether that happened.

    A forward pass that is running is completed, so the cache stays valid. Further ones go to the handler before.
    """
    interrupted = False
    previous = replaceable_handler()

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted and previous is not None:
            previous(number, frame)
        interrupted = True
        cancel()

    with handled_by(handle if previous else None):
        yield lambda: interrupted


@contextmanager
def handled_by(handler: Handler | None) -> Iterator[None]:
    """Handle Ctrl-C by `handler` within the block; None leaves it as it is."""
    if handler is None:
        yield
        return
    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def replaceable_handler() -> Handler | None:
    """The handler of Ctrl-C that a block may replace; None if Ctrl-C is ignored, or left to another thread or to C."""
    handler = signal.getsignal(signal.SIGINT)
    return handler if callable(handler) and threading.current_thread() is threading.main_thread() else None
