"""The cache folder, for files that edge-run can create again."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path


def cache_folder() -> Path:
    """Return the user's cache folder, which may not exist; `EDGERUN_CACHE` overrides the platform's location."""
    override = os.environ.get("EDGERUN_CACHE")
    if override:
        return Path(override)
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        folder = (Path(local) if local else Path.home() / "AppData" / "Local") / "edge-run" / "cache"
    elif sys.platform == "darwin":
        folder = Path.home() / "Library" / "Caches" / "edge-run"
    else:
        base = os.environ.get("XDG_CACHE_HOME")
        folder = (Path(base) if base else Path.home() / ".cache") / "edge-run"
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
