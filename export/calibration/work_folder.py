"""Where a long export keeps what it has found out, so that an interrupted one goes on where it was."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ...errors import DestinationError, InputError
from ...models.atomic import write_atomically
from ...models.cache import cache_folder
from ...models.lock import locked

_KEY_NAME: Final = "made-from.json"
_LOCK_NAME: Final = "lock"
_LOCK_WAIT_S: Final = 1.0


@contextmanager
def work_folder(source: Path, settings: str, kept: Path | None = None) -> Iterator[Path]:
    """The folder for work on a model under some settings: empty, or as an earlier run left it.

    Args:
        source: the checkpoint's folder. A file that has changed since makes another folder.
        settings: everything else that the results depend on.
        kept: a folder to use and to keep; None for one in the cache, which is removed when the block ends without an
            error.

    Raises:
        InputError: `kept` holds work on something else, or another process is at work there.
        DestinationError: the disk refused a write.
    """
    made_from = json.dumps([_files_of(source), settings])
    name = hashlib.sha256(made_from.encode()).hexdigest()[:16]
    folder = cache_folder() / "exports" / name if kept is None else kept
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _held(folder):
            _claim(folder, made_from)
            yield folder
        if kept is None:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise DestinationError(
            f"{folder} cannot be written: {error.strerror or error}", "free space there, or choose another with --work"
        ) from error


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    try:
        with locked(folder / _LOCK_NAME, _LOCK_WAIT_S):
            yield
    except TimeoutError as error:
        raise InputError(
            f"another export is at work in {folder}", "wait for it, or choose another with --work"
        ) from error


def _claim(folder: Path, made_from: str) -> None:
    record = folder / _KEY_NAME
    if record.is_file():
        if record.read_text(encoding="utf-8") != made_from:
            raise InputError(
                f"{folder} holds work on another model, or with other settings", "choose another folder for --work"
            )
    elif any(file.name != _LOCK_NAME for file in folder.iterdir()):
        raise InputError(f"{folder} holds something else", "choose an empty folder for --work, or a new one")
    else:
        write_atomically(record, made_from.encode())


def _files_of(source: Path) -> list[tuple[str, int, int]]:
    files = (path for path in source.iterdir() if path.is_file())
    return sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files)
