"""The cache folder, for files that edge-run can create again."""

from __future__ import annotations

import os
import sys
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
