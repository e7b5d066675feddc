"""Panics of the tokenizers library: recognizing them, and hiding what they print.

A panic of Rust code reaches Python as a `PanicException`, which is not an `Exception`, after Rust has printed a message
and perhaps a backtrace on standard error.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

_STANDARD_ERROR: Final = 2
_MAX_KEPT_BACK: Final = 1 << 16
_HIDDEN: Final = threading.Event()
_REDIRECTED: Final = threading.Lock()


def is_panic(error: BaseException | None) -> bool:
    """Whether an exception stands for a panic of Rust code."""
    kind = type(error)
    return (kind.__module__, kind.__name__) == ("pyo3_runtime", "PanicException")


@contextmanager
def panic_messages_hidden() -> Iterator[None]:
    """Keep messages of panics off standard error during the block.

    For programs that own their standard error, such as the command line: it is redirected during calls of the library,
    and what else was written meanwhile is passed on after the call.
    """
    was_hidden = _HIDDEN.is_set()
    _HIDDEN.set()
    try:
        yield
    finally:
        if not was_hidden:
            _HIDDEN.clear()


@contextmanager
def messages_kept_back() -> Iterator[None]:
    """Around a call of the library: hide what it prints if it panics, where `panic_messages_hidden` says so."""
    if not _HIDDEN.is_set():
        yield
        return
    import tempfile  # noqa: PLC0415  its import takes as long as all the others here

    with _REDIRECTED, tempfile.TemporaryFile() as kept_back:
        saved = None
        with suppress(OSError, ValueError):  # standard error may be closed
            if sys.stderr is not None:
                sys.stderr.flush()
            saved = os.dup(_STANDARD_ERROR)
            os.dup2(kept_back.fileno(), _STANDARD_ERROR)
        panicked = False
        try:
            yield
        except BaseException as error:
            panicked = is_panic(error) or is_panic(error.__cause__)
            raise
        finally:
            if saved is not None:
                os.dup2(saved, _STANDARD_ERROR)
                os.close(saved)
                kept_back.seek(0)
                if not panicked and (written := kept_back.read(_MAX_KEPT_BACK)):
                    with suppress(OSError):
                        os.write(_STANDARD_ERROR, written)
