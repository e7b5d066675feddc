"""A lock between processes.

An open file holds it, so that the lock ends with its process, also if that is killed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
def locked(path: Path, wait_s: float) -> Iterator[None]:
    """Hold the lock file at `path` during the block, against other threads and other processes.

    The file is created if necessary, and stays.

    Raises:
        TimeoutError: the lock was held elsewhere for `wait_s` seconds.
        OSError: the file cannot be created, or its file system has no locks.
    """
    deadline = time.monotonic() + wait_s
    with path.open("ab") as file:
        file.seek(0)  # Windows locks a byte at the file's position
        while True:
            try:
                _take(file)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{path} is in use") from None
                time.sleep(_RETRY_S)
        yield
