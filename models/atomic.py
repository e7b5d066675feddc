"""Writing and removing files and folders atomically: whole or not at all.

What is being written lies beside its destination, under a hidden name with a random token:

    .NAME.TOKEN         a file; its writer has it locked
    .NAME.TOKEN.new     a folder
    .NAME.TOKEN.lock    locked by the process that writes the folder
    .NAME.TOKEN.old     a folder that is being replaced, for the moment between two renames

Locks end with their process, so what a killed process left is found and removed by the next one that writes there
(docs/decisions/0036-atomic-folders.md).
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from .file_system import exchange, locked, move, remove, sync_names, sync_tree, try_lock
from .regular_file import require_replaceable

_TOKEN_BYTES: Final = 6
_TOKEN: Final = f"[0-9a-f]{{{2 * _TOKEN_BYTES}}}"
_FOLDER: Final = re.compile(rf"\.(.+)\.({_TOKEN})\.(?:new|old|lock)", re.DOTALL)
_ATTEMPTS: Final = 3
_OWN_LOCK_WAIT_S: Final = 10.0
"""Another process may hold a new lock for a moment, to find out whether it is abandoned."""


def write_atomically(path: Path, content: bytes | Callable[[BinaryIO], object], *, private: bool = False) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part of it.

    Args:
        path: the file; missing folders are created.
        content: its bytes, or a function that writes them to an open file.
        private: whether only its owner may read it, now and while it is being written; so is a folder that is created.

    Raises:
        OSError: the file cannot be written, or `path` is something else than a file; it is unchanged.
    """
    require_replaceable(path)
    path.parent.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
    remove_abandoned_files(path.parent, re.escape(path.name))
    for attempt in range(_ATTEMPTS):
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(_TOKEN_BYTES)}")
        try:
            _write(temporary, content, private)
            move(temporary, path)
            break
        except FileNotFoundError:
            # Another writer took it for abandoned, before it was locked or after it was closed.
            if attempt + 1 == _ATTEMPTS or not path.parent.is_dir():
                raise
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
    sync_names(path.parent)


@contextmanager
def folder_written_atomically(destination: Path, replaceable: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield an empty sibling folder that replaces `destination` when the block ends without an error.

    An existing destination is replaced only if it is empty or `replaceable(destination)` is true, before the block and
    after it, so that a mistyped path never deletes other files. A link is followed: the folder it points to is
    replaced. On any error the sibling is removed and the destination is unchanged. All files are on the disk before
    they replace others.

    Raises:
        FileExistsError: the destination exists and may not be replaced.
        OSError: the disk refused a write, or a program uses the destination (on Windows).
    """
    destination = Path(os.path.realpath(destination))
    restore_folder(destination)
    _require_replaceable(destination, replaceable)
    with temporary_folder(destination.parent, destination.name) as staging:
        yield staging
        _require_replaceable(destination, replaceable)
        sync_tree(staging)
        if not destination.exists():
            move(staging, destination)
        elif not exchange(staging, destination):
            old = staging.with_suffix(".old")
            move(destination, old)
            try:
                move(staging, destination)
            except BaseException:
                move(old, destination)
                raise
            move(old, staging)
        sync_names(destination.parent)


@contextmanager
def temporary_folder(parent: Path, name: str) -> Iterator[Path]:
    """Yield an empty hidden folder in `parent` and remove it after the block, if it is still there.

    It has the permissions of any new folder; `tempfile` makes folders for their owner alone. What killed processes left
    in `parent` is removed first.

    Raises:
        OSError: the folder cannot be created.
    """
    parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(parent)
    hidden = f".{name}.{secrets.token_hex(_TOKEN_BYTES)}"
    folder = parent / f"{hidden}.new"
    with ExitStack() as stack:
        # Where the file system has no locks, nobody finds the folder abandoned either.
        with suppress(OSError):
            stack.enter_context(locked(parent / f"{hidden}.lock", _OWN_LOCK_WAIT_S, remove=True))
        folder.mkdir()
        try:
            yield folder
        finally:
            with suppress(OSError):  # in use, on Windows: removed by the next process that writes here
                remove(folder)


def discard_folder(folder: Path) -> bool:
    """Remove a folder whole or not at all.

    Returns:
        Whether it is gone; False if a program uses it (on Windows) or the system refused.
    """
    rubbish = folder.with_name(f".{folder.name}.{secrets.token_hex(_TOKEN_BYTES)}.new")
    try:
        folder.rename(rubbish)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    with suppress(OSError):  # its new name marks it abandoned
        remove(rubbish)
    return True


def restore_folder(destination: Path) -> None:
    """Give a folder its name back if a process was killed while it replaced it."""
    if os.path.lexists(destination):
        return
    with suppress(OSError, ValueError):  # names that no file can have
        for name, hidden in _hidden_folders(destination.parent):
            if name == destination.name:
                _complete_abandoned(destination.parent, hidden, clean=False)


def remove_abandoned(parent: Path) -> None:
    """Remove from a folder what killed processes left there, and complete the replacements that they began."""
    with suppress(OSError):
        for _, hidden in _hidden_folders(parent):
            _complete_abandoned(parent, hidden, clean=True)


def _write(temporary: Path, content: bytes | Callable[[BinaryIO], object], private: bool) -> None:
    mode = 0o600 if private else 0o666
    with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        with suppress(OSError):  # a file system without locks
            try_lock(file)
        if isinstance(content, bytes):
            file.write(content)
        else:
            content(file)
        file.flush()
        os.fsync(file.fileno())


def remove_abandoned_files(parent: Path, pattern: str = ".+") -> None:
    """Remove what killed processes left of files in a folder whose names match a regular expression."""
    own = re.compile(rf"\.{pattern}\.{_TOKEN}")
    with suppress(OSError):
        for left in [parent / name for name in os.listdir(parent) if own.fullmatch(name)]:
            with suppress(OSError):
                if not left.is_file():
                    continue
                with left.open("rb") as file:
                    abandoned = try_lock(file)
                if abandoned:
                    left.unlink()


def _require_replaceable(destination: Path, replaceable: Callable[[Path], bool]) -> None:
    is_empty = destination.is_dir() and not any(destination.iterdir())
    if destination.exists() and not is_empty and not (destination.is_dir() and replaceable(destination)):
        raise FileExistsError(str(destination))


def _hidden_folders(parent: Path) -> list[tuple[str, str]]:
    """List the folders that are being written in `parent`: destination, and hidden name without suffix."""
    matches = filter(None, map(_FOLDER.fullmatch, os.listdir(parent)))
    return list(dict.fromkeys((match[1], f".{match[1]}.{match[2]}") for match in matches))


def _complete_abandoned(parent: Path, hidden: str, *, clean: bool) -> None:
    """Complete a replacement unless the process that writes the folder is alive; with `clean`, remove what it left."""
    lock, new, old = (parent / f"{hidden}.{suffix}" for suffix in ("lock", "new", "old"))
    with suppress(OSError), locked(lock, 0.0, remove=True):
        if not new.exists() and not old.exists():
            # Its process may be about to lock it, which fails if the file is gone first. Windows keeps it then.
            with suppress(OSError):
                lock.unlink()
            return
        destination = parent / hidden[1:].rpartition(".")[0]
        if old.is_dir() and not os.path.lexists(destination):
            move(old, destination)
        for folder in (new, old) if clean else ():
            remove(folder)
