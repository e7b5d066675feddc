"""Captures the process's standard error, including what native libraries write."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_STDERR: Final = 2
_LOCK: Final = threading.Lock()


class CapturedText:
    """Captured output; `text` is set when the capture ends."""

    text: str = ""


@contextmanager
def captured_stderr() -> Iterator[CapturedText]:
    """Capture what any part of the process writes to standard error, instead of showing it.

    Captures nothing if the process has no standard error.
    """
    captured = CapturedText()
    with _LOCK:
        try:
            original = os.dup(_STDERR)
        except OSError:
            yield captured
            return
        with tempfile.TemporaryFile() as file:
            _flush()
            os.dup2(file.fileno(), _STDERR)
            try:
                yield captured
            finally:
                _flush()
                os.dup2(original, _STDERR)
                os.close(original)
                file.seek(0)
                captured.text = file.read().decode("utf-8", errors="replace")


def _flush() -> None:
    if sys.stderr is not None and not sys.stderr.closed:
        sys.stderr.flush()
