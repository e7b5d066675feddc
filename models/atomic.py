"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader sees the old file or the new one, never a part.

    Raises:
        OSError: the file cannot be written; `path` is as it was before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def folder_written_atomically(destination: Path, replaceable: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield an empty sibling folder that takes `destination`'s place when the block ends without an error.

    An existing destination is replaced only if it is empty or `replaceable(destination)` agrees, so that a mistyped
    path never deletes someone's files. On any error the sibling is removed and the destination is untouched.

    Raises:
        FileExistsError: the destination exists and may not be replaced.
        OSError: the disk refused a write.
    """
    destination = destination.absolute()
    if destination.exists() and not _may_replace(destination, replaceable):
        raise FileExistsError(str(destination))
    destination.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", suffix=".new", dir=destination.parent))
    try:
        staging.chmod(0o755)  # mkdtemp makes it private; a model folder is shared like any other
        yield staging
        _swap_in(staging, destination)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _may_replace(destination: Path, replaceable: Callable[[Path], bool]) -> bool:
    return destination.is_dir() and (not any(destination.iterdir()) or replaceable(destination))


def _swap_in(staging: Path, destination: Path) -> None:
    """Move `staging` to `destination`; what stood there comes back if the second rename fails."""
    if not destination.exists():
        staging.rename(destination)
        return
    old = staging.with_suffix(".old")
    destination.rename(old)
    try:
        staging.rename(destination)
    except BaseException:
        old.rename(destination)
        raise
    shutil.rmtree(old, ignore_errors=True)
