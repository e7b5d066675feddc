"""Renames, removes, syncs and locks files and folders on every operating system.

Windows refuses to remove or rename what is open or mapped into memory anywhere, and virus scanners and indexers open
new files for a moment. Operations that it refuses for that reason are repeated for a short time.

An open file holds a lock between processes, so that the lock ends with its process, also if that is killed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final, TypeVar

_Result = TypeVar("_Result")

_IN_USE: Final = (5, 32)
"""Windows's error codes for files in use: access denied, sharing violation."""
_PAUSES_S: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
"""Pauses before repetitions, in seconds."""
_HERE: Final = -100
"""Linux: paths are relative to the current folder (AT_FDCWD)."""
_EXCHANGE: Final = 2
"""Linux: RENAME_EXCHANGE; macOS: RENAME_SWAP."""
_RETRY_S: Final = 0.005


def is_in_use(error: OSError) -> bool:
    """Whether Windows refused an operation because a program uses the file."""
    return getattr(error, "winerror", None) in _IN_USE


def move(source: Path, target: Path) -> None:
    """Rename a file or a folder; an existing file is replaced, an existing folder is not.

    Raises:
        OSError: the system refused, on Windows for more than a second if something is in use.
    """
    _patiently(lambda: os.replace(source, target))


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that it holds; nothing is done if there is none.

    Raises:
        OSError: the system refused, on Windows for more than a second if something is in use.
    """

    def attempt() -> None:
        with suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    _patiently(attempt)


def remove_oldest(sizes: Mapping[Path, int], most: int, discard: Callable[[Path], object]) -> None:
    """Remove the least recently used of some files or folders until all together have at most a size.

    Other processes may remove some meanwhile. What the system refuses to remove stays.

    Args:
        sizes: the size of each.
        most: largest sum of the sizes.
        discard: removes one.
    """
    total, used = sum(sizes.values()), dict.fromkeys(sizes, 0.0)
    for path in sizes:
        with suppress(OSError):
            used[path] = path.stat().st_mtime
    for path in sorted(sizes, key=used.__getitem__):
        if total <= most:
            break
        with suppress(OSError):
            discard(path)
        if not os.path.lexists(path):
            total -= sizes[path]


def exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two folders in one step, if the system and the file system can.

    Source: renameat2(2) of Linux, renamex_np(2) of macOS.

    Returns:
        Whether they were exchanged.
    """
    if os.name != "posix":
        return False
    names = os.fsencode(first), os.fsencode(second)
    library = ctypes.CDLL(None)
    if hasattr(library, "renameat2"):
        failed = library.renameat2(_HERE, names[0], _HERE, names[1], _EXCHANGE)
    elif hasattr(library, "renamex_np"):
        failed = library.renamex_np(*names, _EXCHANGE)
    else:
        return False
    return int(failed) == 0


def sync_tree(folder: Path) -> None:
    """Make the system write all files of a folder, and their names, to the disk.

    Raises:
        OSError: the disk refused a write.
    """
    for root, _, names in os.walk(folder):
        for name in names:
            try:  # Windows syncs only files that are open for writing
                descriptor = os.open(os.path.join(root, name), os.O_RDWR if os.name == "nt" else os.O_RDONLY)
            except PermissionError:  # a read-only file
                continue
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_names(Path(root))


def sync_names(folder: Path) -> None:
    """Make the system write the names of a folder's files to the disk, where it can sync folders."""
    if os.name == "nt":
        return
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _patiently(operation: Callable[[], _Result]) -> _Result:
    """Repeat an operation while Windows refuses it because something is in use."""
    for pause in _PAUSES_S:
        try:
            return operation()
        except PermissionError as error:
            if not is_in_use(error):
                raise
        time.sleep(pause)
    return operation()


if sys.platform == "win32":
    import msvcrt

    def _take(file: IO[bytes]) -> None:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _take(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def locked(
    path: Path, wait_s: float, *, remove: bool = False, waiting: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Hold the lock file at `path` during the block, against other threads and other processes.

    Args:
        path: the file, which is created if necessary.
        wait_s: how long to wait for another holder, in seconds.
        remove: whether the file is removed after the block; else it stays.
        waiting: called again and again while another holds the lock.

    Raises:
        TimeoutError: the lock was held elsewhere for `wait_s` seconds.
        OSError: the file cannot be created, or its file system has no locks.
    """
    deadline = time.monotonic() + wait_s
    file = _locked_file(path)
    while file is None:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{path} is in use")
        waiting()
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


def _locked_file(path: Path) -> IO[bytes] | None:
    """Open and lock a file; None if another holds it, or removed it meanwhile."""
    file = path.open("ab")
    try:
        file.seek(0)  # Windows locks a byte at the file's position
        if try_lock(file):
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return file
    except BaseException:
        file.close()
        raise
    file.close()
    return None
