"""Symbolic links, which Windows allows only to some users."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest


def _links_are_allowed() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            os.symlink("nowhere", Path(folder, "link"))
        except (OSError, NotImplementedError):
            return False
    return True


needs_links = pytest.mark.skipif(not _links_are_allowed(), reason="symbolic links")
