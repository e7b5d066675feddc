"""What Ctrl-C does while something is answered: it ends the answer.

Ctrl-C stays ignored where the parent process ignores it, and a handler that is not written in Python stays too.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupts:
    """Gives Ctrl-C to what is being done, within the block.

    It raises nothing by itself: an exception in the middle of drawing, or of changing the terminal's modes, would leave
    both in disorder. Where nothing takes a Ctrl-C, it is kept for what comes next.

    Args:
        enough: number of times that Ctrl-C is pressed before what does not end by itself is left.
    """

    def __init__(self, enough: int = 3) -> None:
        self._enough = enough
        self._act: Callable[[], None] | None = None
        self._presses = 0
        self._previous: Any = None

    def __enter__(self) -> Interrupts:
        if callable(signal.getsignal(signal.SIGINT)) and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_error: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    @contextmanager
    def calling(self, act: Callable[[], None]) -> Iterator[None]:
        """Call `act` for every Ctrl-C within the block, and at its beginning for one that came before.

        Of blocks within each other, the inner one acts.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed again and again.
        """
        before, self._act = self._act, act
        try:
            if self._presses:
                act()
            yield
        finally:
            self._act = before

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
        if self._presses > self._enough and self._act is not None:
            self._raise()
        if self._act is not None:
            self._act()

    def _raise(self) -> None:
        self._presses = 0
        raise KeyboardInterrupt
