"""Cancelling a request that may be waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...errors import EdgeError


class CancelledError(EdgeError):
    """The request was cancelled before it had a result."""


class Cancellation:
    """Whether a request was cancelled; `cancel` may be called from any thread, and wakes what waits for the request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._actions: dict[object, Callable[[], None]] = {}

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled

    def cancel(self) -> None:
        """Cancel the request: the actions of `calling` run in this thread; calling it again does nothing."""
        with self._lock:
            first, self._cancelled = not self._cancelled, True
            actions = list(self._actions.values()) if first else []
        for action in actions:
            action()

    @contextmanager
    def calling(self, action: Callable[[], None]) -> Iterator[None]:
        """Within the block, a cancellation calls `action` once; at once if the request is cancelled already.

        Args:
            action: takes no lock that the block holds when it begins; it may still run when the block has ended.
        """
        key = object()
        with self._lock:
            self._actions[key] = action
            cancelled = self._cancelled
        try:
            if cancelled:
                action()
            yield
        finally:
            with self._lock:
                self._actions.pop(key, None)

    def check(self) -> None:
        """Raise if the request was cancelled.

        Raises:
            CancelledError: it was.
        """
        if self._cancelled:
            raise CancelledError("the request was cancelled")
