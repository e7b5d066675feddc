"""Opening files of users and of models: regular files of a bounded size only.

A named pipe or a device in the place of a file would block its reader for ever or never end, and a sparse file of
gigabytes takes no room on the disk. All of these are refused before anything is read.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Final

from ..errors import EdgeError

MAX_JSON_BYTES: Final = 32 << 20
"""Largest file of settings, a hundred times what such files have; parsing takes about thirty times as much memory."""
MAX_TOKENIZER_BYTES: Final = 128 << 20
"""Largest tokenizer.json; one of 262,144 tokens has 33 MB."""
MAX_TEXT_BYTES: Final = 256 << 20
"""Largest text file: prompts, recordings and calibration text."""
_OPEN_FILES: Final = ("/dev/fd", "/proc/self/fd")
"""Folders in which Unix shows the files that this process has open."""
_KINDS: Final = {"d": "a folder", "p": "a pipe", "s": "a socket", "c": "a device", "b": "a device"}
"""Kinds of files by the first character of `stat.filemode`."""


@contextmanager
def os_errors_as(error_type: type[EdgeError], what: str, hint: str) -> Iterator[None]:
    """Convert an `OSError` of the block to another error; `what` says what failed, such as "FILE cannot be read"."""
    try:
        yield
    except OSError as error:
        raise error_type(f"{what}: {error.strerror or error}", hint) from error


def open_regular(path: Path, max_bytes: int | None = None) -> BufferedReader:
    """Open a regular file for reading, without waiting for anything else of that name.

    Args:
        path: path of the file.
        max_bytes: largest size that is accepted; None for any.

    Raises:
        OSError: the file does not exist, cannot be opened, is something else or larger; `strerror` says which.
    """
    # Opening a device can have effects, so it is looked at first; between the two it may have been replaced.
    _check(os.stat(path), path, max_bytes)
    # Without O_NONBLOCK, opening a pipe waits for a writer. For regular files it makes no difference.
    without_waiting = getattr(os, "O_NONBLOCK", 0)
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | without_waiting))  # noqa: SIM115
    try:
        _check(os.fstat(file.fileno()), path, max_bytes)
    except OSError:
        file.close()
        raise
    return file


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Read a whole regular file of at most `max_bytes` bytes.

    Raises:
        OSError: the file cannot be read, is something else or larger; `strerror` says which.
    """
    with open_regular(path, max_bytes) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:  # it has grown since it was opened
        raise _too_large(len(data), path, max_bytes)
    return data


def read_regular_or_substitution(path: Path, max_bytes: int) -> bytes:
    """Read a whole regular file, or what a shell's process substitution, such as `<(sort file)`, writes.

    The shell hands over a pipe that is open already, under a path such as /dev/fd/63: reading it ends with the process
    that writes to it. Named pipes stay refused, because nobody may ever write to them.

    Raises:
        OSError: as for `read_regular`, or the pipe cannot be read.
    """
    if str(path.parent) not in _OPEN_FILES or not path.name.isdecimal() or not stat.S_ISFIFO(os.stat(path).st_mode):
        return read_regular(path, max_bytes)
    with os.fdopen(os.dup(int(path.name)), "rb") as pipe:
        data = pipe.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes", str(path))
    return data


def require_replaceable(path: Path) -> None:
    """Check that a path is free or a regular file, before a new file is moved there.

    Raises:
        OSError: it is a folder, a device or something else, or no path of a file, or it cannot be looked at.
    """
    try:
        _check(os.stat(path), path, None)
    except (FileNotFoundError, NotADirectoryError):
        return
    except ValueError as error:  # it has a null byte
        raise OSError(errno.EINVAL, str(error), str(path)) from error


def _check(status: os.stat_result, path: Path, max_bytes: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.filemode(status.st_mode)[0], "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
    if max_bytes is not None and status.st_size > max_bytes:
        raise _too_large(status.st_size, path, max_bytes)


def _too_large(size: int, path: Path, max_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"it has {size} bytes, and files of its kind at most {max_bytes}", str(path))
