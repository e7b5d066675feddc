"""Waiting for what other threads do."""

from __future__ import annotations

import threading
from collections.abc import Callable

_LIMIT_S = 300
"""Far above what it takes."""
_POLL_S = 0.01


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true.

    Raises:
        TimeoutError: it was not within five minutes.
    """
    event = threading.Event()
    for _ in range(int(_LIMIT_S / _POLL_S)):
        if condition():
            return
        event.wait(_POLL_S)
    raise TimeoutError(f"waited for {_LIMIT_S} seconds")
