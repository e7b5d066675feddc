"""What native libraries write to the process's standard error meanwhile."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_DESCRIPTOR: Final = 2
_ONE_AT_A_TIME: Final = threading.Lock()


class Written:
    """What was written, once it is known."""

    text: str = ""


@contextmanager
def standard_error_kept() -> Iterator[Written]:
    """Keep what is written to standard error, by whatever part of the process, instead of showing it.

    Where the process has no standard error nothing is kept.
    """
    written = Written()
    with _ONE_AT_A_TIME:
        try:
            shown = os.dup(_DESCRIPTOR)
        except OSError:
            yield written
            return
        with tempfile.TemporaryFile() as file:
            _flush()
            os.dup2(file.fileno(), _DESCRIPTOR)
            try:
                yield written
            finally:
                _flush()
                os.dup2(shown, _DESCRIPTOR)
                os.close(shown)
                file.seek(0)
                written.text = file.read().decode("utf-8", errors="replace")


def _flush() -> None:
    if sys.stderr is not None and not sys.stderr.closed:
        sys.stderr.flush()
