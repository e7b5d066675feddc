"""What Ctrl-C does: it ends an answer, or what is typed at a prompt, and a chat goes on.

Ctrl-C stays ignored where the parent process ignores it, and a handler that is not written in Python stays too.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, TypeAlias

Handler: TypeAlias = Callable[[int, FrameType | None], Any]

_ENOUGH: Final = 3
"""Number of times that Ctrl-C is pressed before what does not end by itself is left."""


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


class ChatInterrupts:
    """Gives Ctrl-C to what a chat is doing, within the block.

    It raises nothing by itself: an exception in the middle of drawing, or of changing the terminal's modes, would leave
    both in disorder. Where nothing takes a Ctrl-C, it is kept for what comes next.
    """

    def __init__(self) -> None:
        self._act: Callable[[], None] | None = None
        self._presses = 0
        self._stack = _handled_by(self._handle if _replaceable_handler() else None)

    def __enter__(self) -> ChatInterrupts:
        self._stack.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    @contextmanager
    def calling(self, act: Callable[[], None]) -> Iterator[None]:
        """Call `act` for every Ctrl-C within the block, and at its beginning for one that came before.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed again and again.
        """
        self._act = act
        try:
            if self._presses:
                act()
            yield
        finally:
            self._act = None

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Let Ctrl-C raise `KeyboardInterrupt` within the block, for what can be left anywhere."""
        with self.calling(self._raise):
            yield

    def take(self) -> bool:
        """Whether Ctrl-C was pressed since the last call."""
        pressed, self._presses = self._presses > 0, 0
        return pressed

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._presses += 1
        if self._presses > _ENOUGH and self._act is not None:
            self._raise()
        if self._act is not None:
            self._act()

    def _raise(self) -> None:
        self._presses = 0
        raise KeyboardInterrupt


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
