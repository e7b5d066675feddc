"""A lock between processes.

An open file holds it, so that the lock ends with its process, also if that is killed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

if sys.platform == "win32":
    import msvcrt

    def _take(file: IO[bytes]) -> None:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _take(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


_RETRY_S: Final = 0.005


@contextmanager
def locked(path: Path, wait_s: float, *, remove: bool = False) -> Iterator[None]:
    """Hold the lock file at `path` during the block, against other threads and other processes.

    Args:
        path: the file, which is created if necessary.
        wait_s: how long to wait for another holder, in seconds.
        remove: whether the file is removed after the block; else it stays.

    Raises:
        TimeoutError: the lock was held elsewhere for `wait_s` seconds.
        OSError: the file cannot be created, or its file system has no locks.
    """
    deadline = time.monotonic() + wait_s
    file = _locked_file(path)
    while file is None:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{path} is in use")
        time.sleep(_RETRY_S)
        file = _locked_file(path)
    try:
        with file:
            yield
    finally:
        if remove:
            with suppress(OSError):  # on Windows it stays while another process tries to lock it
                path.unlink()


def try_lock(file: IO[bytes]) -> bool:
    """Lock an open file until it is closed; return False if another holds it."""
    try:
        _take(file)
    except (BlockingIOError, PermissionError):
        return False
    return True


def is_at(file: IO[bytes], path: Path) -> bool:
    """Whether an open file is still the one with this name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _locked_file(path: Path) -> IO[bytes] | None:
    """Open and lock a file; None if another holds it, or removed it meanwhile."""
    file = path.open("ab")
    try:
        file.seek(0)  # Windows locks a byte at the file's position
        if try_lock(file) and is_at(file, path):
            return file
    except BaseException:
        file.close()
        raise
    file.close()
    return None
