"""The lock that threads have in turns, so that those that always want it alternate."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

POLL_S: Final = 0.05
"""Seconds after which a waiting thread looks for signals and cancellations."""


class TurnLock:
    """A lock with a queue: releasing it gives it to the thread that has waited longest.

    An ordinary lock may be taken again by the thread that has just released it, any number of times. With this one, two
    threads that always want it alternate.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self.waiting: Final[deque[threading.Lock]] = deque()
        """A lock for each waiting thread, released when the turn is given to it."""
        self._held = False
        self._holder: int | None = None

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread holds the lock."""
        return self._holder == threading.get_ident()

    def try_acquire(self) -> bool:
        """Take the lock if it is free; False if it is not."""
        with self._guard:
            return self._take()

    def acquire(self) -> None:
        """Wait for the lock."""
        with self._guard:
            if self._take():
                return
            turn = threading.Lock()
            turn.acquire()
            self.waiting.append(turn)
        try:
            while not turn.acquire(timeout=POLL_S):
                pass
        except BaseException:  # an interrupt: the turn may have been given to this thread already
            with self._guard:
                if turn in self.waiting:
                    self.waiting.remove(turn)
                else:
                    self._give_to_next()
            raise
        self._holder = threading.get_ident()

    def release(self) -> None:
        """Give the lock to the thread that has waited longest."""
        with self._guard:
            self._give_to_next()

    def pass_on(self) -> None:
        """Let every thread that waits now have the lock once before this one, which holds it, has it again."""
        if self.waiting:
            self.release()
            self.acquire_again()

    def acquire_again(self) -> None:
        """Wait for the lock; an interrupt is raised once the caller holds it."""
        interrupt: BaseException | None = None
        while True:
            try:
                self.acquire()
                break
            except BaseException as error:  # noqa: BLE001  raised below
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def __enter__(self) -> TurnLock:
        self.acquire()
        return self

    def __exit__(self, *_error: object) -> None:
        self.release()

    def _take(self) -> bool:
        if self._held:
            return False
        self._held = True
        self._holder = threading.get_ident()
        return True

    def _give_to_next(self) -> None:
        self._holder = None
        if self.waiting:
            self.waiting.popleft().release()
        else:
            self._held = False
