"""Ctrl-C during an answer ends the answer, a second one the program; a chat catches it at its prompt.

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
    previous = _replaceable_handler()

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted and previous is not None:
            previous(number, frame)
        interrupted = True
        cancel()

    with _handled_by(handle if previous else None):
        yield lambda: interrupted


@contextmanager
def raising_on_interrupt() -> Iterator[None]:
    """Let every Ctrl-C within the block raise `KeyboardInterrupt`, for a caller that catches it and goes on."""
    with _handled_by(signal.default_int_handler if _replaceable_handler() else None):
        yield


@contextmanager
def _handled_by(handler: Handler | None) -> Iterator[None]:
    """Handle Ctrl-C by `handler` within the block; None leaves it as it is."""
    if handler is None:
        yield
        return
    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _replaceable_handler() -> Handler | None:
    """The handler of Ctrl-C that a block may replace; None if Ctrl-C is ignored, or left to another thread or to C."""
    handler = signal.getsignal(signal.SIGINT)
    return handler if callable(handler) and threading.current_thread() is threading.main_thread() else None
