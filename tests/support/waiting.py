"""Waiting for what other threads do."""

from __future__ import annotations

import threading
from collections.abc import Callable

_LIMIT_S = 300
"""Far above what it takes."""


def wait_until(condition: Callable[[], bool], what: str = "it does not come true") -> None:
    """Wait until a condition is true, and fail the test with `what` if it is not within five minutes."""
    event = threading.Event()
    for _ in range(100 * _LIMIT_S):
        if condition():
            return
        event.wait(0.01)
    raise AssertionError(what)
