"""Writing files and folders atomically: whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write `data` to `path` so that a reader sees the old file or the new one, never a part of it.

    Args:
        path: the file; folders that are missing are made.
        data: what it will hold.
        private: whether only its owner may read it, now and while it is being written.

    Raises:
        OSError: the file cannot be written; `path` is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Unless asked to, do not narrow who may read it, as tempfile would.
    mode = 0o600 if private else 0o666
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def folder_written_atomically(destination: Path, replaceable: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield an empty sibling folder that replaces `destination` when the block ends without an error.

    An existing destination is replaced only if it is empty or `replaceable(destination)` is true, before the block and
    after it, so that a mistyped path never deletes other files. A link is followed: the folder it points to is
    replaced. On any error the sibling is removed and the destination is unchanged.

    Raises:
        FileExistsError: the destination exists and may not be replaced.
        OSError: the disk refused a write.
    """
    destination = Path(os.path.realpath(destination))
    _require_replaceable(destination, replaceable)
    destination.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", suffix=".new", dir=destination.parent))
    try:
        staging.chmod(0o755)  # mkdtemp creates it for its owner alone
        yield staging
        _require_replaceable(destination, replaceable)
        _swap_in(staging, destination)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _require_replaceable(destination: Path, replaceable: Callable[[Path], bool]) -> None:
    if not destination.exists():
        return
    if not destination.is_dir() or (any(destination.iterdir()) and not replaceable(destination)):
        raise FileExistsError(str(destination))


def _swap_in(staging: Path, destination: Path) -> None:
    """Move `staging` to `destination`; the old folder is restored if the second rename fails."""
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
