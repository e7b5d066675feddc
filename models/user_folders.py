"""The folders of this user: what edge-run can create again, and what it cannot."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from pathlib import Path


def cache_folder() -> Path:
    """Return the user's cache folder, which may not exist; `EDGERUN_CACHE` overrides the platform's location."""
    if override := os.environ.get("EDGERUN_CACHE"):
        return Path(override)
    if sys.platform == "win32":
        folder = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "edge-run" / "cache"
    elif sys.platform == "darwin":
        folder = Path.home() / "Library" / "Caches" / "edge-run"
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edge-run"
    return folder


def make_private(folder: Path) -> None:
    """Take a folder of the cache, and the files in it, from other users; does nothing if it is private or missing.

    Earlier versions let others read what was learned from conversations.
    """
    with suppress(OSError):  # there is none, or it belongs to another user
        if os.name == "posix" and folder.stat().st_mode & 0o077:
            for entry in os.scandir(folder):
                if entry.is_file(follow_symlinks=False):
                    os.chmod(entry.path, 0o600)
            folder.chmod(0o700)


def data_folder() -> Path:
    """Return the user's data folder, which may not exist; `EDGERUN_HOME` overrides the platform's location."""
    if override := os.environ.get("EDGERUN_HOME"):
        return Path(override)
    from platformdirs import user_data_path  # noqa: PLC0415  programs that name models by their paths need none of it

    return user_data_path("edge-run", appauthor=False)


def make_private_folder(folder: Path) -> None:
    """Create a folder that its owner alone can read, with the folders above it; one that exists stays as it is.

    On Windows it has the permissions of the folder above, which in a user's profile are the user's own.

    Raises:
        OSError: it cannot be created.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is not a folder", str(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def make_private_file(path: Path) -> None:
    """Create an empty file that its owner alone can read; from one that exists, other users' permissions are taken.

    Raises:
        OSError: it cannot be created.
    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        # Not opened again: closing it would drop the locks that SQLite has on it in this process.
        if os.name == "posix" and path.stat().st_mode & 0o077:
            path.chmod(0o600)
