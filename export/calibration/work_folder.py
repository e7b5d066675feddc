"""The folder that keeps intermediate results of an interrupted export."""

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
    """Yield the folder for one model and its settings, locked: empty, or as an interrupted run left it.

    Args:
        source: The checkpoint's folder; if one of its files changed, another folder is used.
        settings: Everything else that the results depend on.
        kept: A folder to use and to keep; None for one in the cache, which is removed when the block ends without an
            error.

    Raises:
        InputError: `kept` belongs to another model or other settings, or another process uses it.
        DestinationError: The disk refused a write.
    """
    made_from = json.dumps([_file_stats(source), settings])
    name = hashlib.sha256(made_from.encode()).hexdigest()[:16]
    folder = cache_folder() / "exports" / name if kept is None else kept
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            _claim(folder, made_from)
            yield folder
        if kept is None:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise DestinationError(
            f"{folder} cannot be written: {error.strerror or error}", "free space there, or choose another with --work"
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        with locked(folder / _LOCK_NAME, _LOCK_WAIT_S):
            yield
    except TimeoutError as error:
        raise InputError(f"another export uses {folder}", "wait for it, or choose another with --work") from error


def _claim(folder: Path, made_from: str) -> None:
    record = folder / _KEY_NAME
    if record.is_file():
        if record.read_text(encoding="utf-8") != made_from:
            raise InputError(
                f"{folder} holds work on another model, or with other settings", "choose another folder for --work"
            )
    elif any(file.name != _LOCK_NAME for file in folder.iterdir()):
        raise InputError(f"{folder} holds other files", "choose an empty or new folder for --work")
    else:
        write_atomically(record, made_from.encode())


def _file_stats(source: Path) -> list[tuple[str, int, int]]:
    files = (path for path in source.iterdir() if path.is_file())
    return sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files)
