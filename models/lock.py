"""A lock between processes: held by an open file, so that it ends with the process that held it, however that ends."""

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


_BETWEEN_TRIES_S: Final = 0.005


@contextmanager
def locked(path: Path, wait_s: float) -> Iterator[None]:
    """Hold the lock file at `path`, which is made if need be and stays, during the block.

    It keeps out other threads as well as other processes. Closing the file lets go of it.

    Raises:
        TimeoutError: somebody else held it for `wait_s` seconds.
        OSError: the file cannot be made, or its file system has no locks.
    """
    until = time.monotonic() + wait_s
    with path.open("ab") as file:
        file.seek(0)  # Windows locks a byte at the file's position
        while True:
            try:
                _take(file)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= until:
                    raise TimeoutError(f"{path} is in use") from None
                time.sleep(_BETWEEN_TRIES_S)
        yield
