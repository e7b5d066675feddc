"""The folder that keeps intermediate results of an interrupted export, and the file of its measured numbers.

Folders in the cache lie in `exports/KEY`, where the key is made of model and settings. `locks/KEY` locks them, because
a folder with an open file cannot be removed on Windows.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from ...errors import DestinationError, InputError
from ...models.atomic import discard_folder, remove_abandoned, write_atomically
from ...models.file_system import locked
from ...models.json_file import is_finite, parse_json_object
from ...models.regular_file import MAX_JSON_BYTES, read_regular
from ...models.user_folders import cache_folder

_KEY_NAME: Final = "made-from.json"
_LOCK_NAME: Final = "lock"
_LOCK_WAIT_S: Final = 1.0
_KEPT_S: Final = 14 * 24 * 3600.0
"""How long the cache keeps the work of an export that was not continued, in seconds."""


class KeptNumbers:
    """Measured numbers by what they were measured of; each is written as soon as it is known, and not measured again.

    Args:
        file: their file, of one model and text; one that is missing or damaged holds none.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            stored = parse_json_object(read_regular(file, MAX_JSON_BYTES))
        except (OSError, ValueError):
            stored = {}
        self._numbers = {key: float(value) for key, value in stored.items() if is_finite(value)}

    def get(self, key: str, measure: Callable[[], float]) -> float:
        """The number of a key, measured unless it is known.

        Raises:
            OSError: The disk refused a write.
        """
        if key not in self._numbers:
            self._numbers[key] = measure()
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file, json.dumps(self._numbers, indent=0).encode())
        return self._numbers[key]


@contextmanager
def work_folder(source: Path, settings: str, kept: Path | None = None) -> Iterator[Path]:
    """Yield the folder for one model and its settings, locked: empty, or as an interrupted run left it.

    Args:
        source: The checkpoint's folder; if one of its files changed, another folder is used.
        settings: Everything else that the results depend on.
        kept: A folder to use and to keep; None for one in the cache, which is removed when the block ends without an
            error. Nothing should map its files into memory then, because Windows does not remove such files.

    Raises:
        InputError: `kept` belongs to another model or other settings, or another process uses it.
        DestinationError: The disk refused a write.
    """
    stats = ((path.name, path.stat()) for path in source.iterdir() if path.is_file())
    made_from = json.dumps([sorted((name, each.st_size, each.st_mtime_ns) for name, each in stats), settings])
    name = hashlib.sha256(made_from.encode()).hexdigest()[:16]
    folder = kept or cache_folder() / "exports" / name
    try:
        (kept or folder.parent).mkdir(parents=True, exist_ok=True)
        if kept is None:
            _remove_old(folder.parent)
        with locked(_lock_of(folder) if kept is None else kept / _LOCK_NAME, _LOCK_WAIT_S):
            if kept is None and not (folder / _KEY_NAME).is_file():
                discard_folder(folder)  # a process may be killed while it writes the record
            folder.mkdir(exist_ok=True)
            _claim(folder, made_from)
            yield folder
            if kept is None:
                gc.collect()  # arrays in reference cycles may still map files
                discard_folder(folder)
    except TimeoutError as error:
        raise InputError(f"another export uses {folder}", "wait for it, or choose another with --work") from error
    except OSError as error:
        raise DestinationError(
            f"{folder} cannot be written: {error.strerror or error}", "free space there, or choose another with --work"
        ) from error


def _lock_of(folder: Path) -> Path:
    """The lock file of a folder in the cache."""
    lock = folder.parent.parent / "locks" / folder.name
    lock.parent.mkdir(exist_ok=True)
    return lock


def _remove_old(exports: Path) -> None:
    """Remove work that was not continued for long, and what killed processes left half removed."""
    remove_abandoned(exports)
    for folder in [each for each in exports.iterdir() if each.is_dir() and not each.name.startswith(".")]:
        with suppress(OSError):  # in use, or removed meanwhile
            if time.time() - folder.stat().st_mtime > _KEPT_S:
                with locked(_lock_of(folder), 0.0):
                    discard_folder(folder)


def _claim(folder: Path, made_from: str) -> None:
    record = folder / _KEY_NAME
    if record.is_file():
        if record.read_text(encoding="utf-8") != made_from:
            raise InputError(
                f"{folder} holds work on another model, or with other settings", "choose another folder for --work"
            )
        os.utime(folder)
    elif any(file.name != _LOCK_NAME for file in folder.iterdir()):
        raise InputError(f"{folder} holds other files", "choose an empty or new folder for --work")
    else:
        write_atomically(record, made_from.encode())
