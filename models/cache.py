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
        base = os.environ.get("LOCALAPPDATA")
        return Path(base) / "edge-run" / "cache" if base else Path.home() / "AppData" / "Local" / "edge-run" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "edge-run"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "edge-run"
