"""Pages of mapped files are dropped only if they can be read from the file again."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest

from edgerun.runtime.graph.memory import drop_file_pages

SIZE = 4 << 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_dropped_pages_are_read_from_the_file_again(file: Path) -> None:
    with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        before = mapping[:]
        assert drop_file_pages(file) >= SIZE
        assert drop_file_pages(file) < SIZE
        assert mapping[:] == before
    assert drop_file_pages(file.with_name("other")) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_pages_that_were_written_to_are_kept(file: Path) -> None:
    with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
        mapping[5:8] = b"new"
        assert drop_file_pages(file) == 0
        assert mapping[5:8] == b"new"
