"""What can lie in the place of a file: pipes, folders, links, sparse files."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

needs_pipes = pytest.mark.skipif(sys.platform == "win32", reason="named pipes are not in the file system")


def remove(path: Path) -> None:
    """Remove a file, a folder or a link, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def replace_by_pipe(path: Path) -> Path:
    """Put a named pipe that nobody writes to in the place of a file."""
    remove(path)
    os.mkfifo(path)
    return path


def replace_by_sparse_file(path: Path, size: int) -> Path:
    """Put a file of `size` zero bytes in the place of another; it takes no room on the disk."""
    remove(path)
    with path.open("wb") as file:
        file.truncate(size)
    return path


def _links_are_allowed() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            os.symlink("nowhere", Path(folder, "link"))
        except (OSError, NotImplementedError):
            return False
    return True


needs_links = pytest.mark.skipif(not _links_are_allowed(), reason="symbolic links")
