"""Pages of mapped files are dropped only if they can be read from the file again, and where too many are resident."""

from __future__ import annotations

import mmap
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgerun.runtime.graph import memory, packed_files
from edgerun.runtime.graph.memory import MappedPages, PageLimit, pages_dropped
from edgerun.runtime.graph.packed_files import LARGE_PAGE

SIZE = 4 << 20
CONTENTS = bytes(range(256)) * (SIZE // 256)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(CONTENTS)
    return path


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    path = tmp_path / "copy"
    path.write_bytes(CONTENTS * 2)
    return path


def mapped(*files: Path) -> Iterator[tuple[mmap.mmap, MappedPages]]:
    """Mappings of files that were read, and their pages."""
    for file in files:
        with pages_dropped([file]) as found, file.open("rb") as handle:
            mapping = mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ)
        assert mapping[:SIZE] == CONTENTS
        yield mapping, found[0]


def resident(file: Path) -> int:
    """Resident bytes of the mappings of a file."""
    maps = Path("/proc/self/smaps").read_text(encoding="utf-8").split(str(file))[1:]
    return sum(int(each.split("Rss:")[1].split()[0]) << 10 for each in maps)


def test_dropped_pages_are_read_from_the_file_again(file: Path) -> None:
    with pages_dropped([file, file.with_name("other")]) as found, file.open("rb") as handle:
        mapping = mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ)
        assert mapping[:] == CONTENTS
    assert found[0].size == SIZE
    assert resident(file) < SIZE
    assert mapping[:] == CONTENTS
    found[0].drop()
    assert resident(file) < SIZE
    assert mapping[:] == CONTENTS


def test_pages_that_were_written_to_are_kept(file: Path) -> None:
    with pages_dropped([file]) as found, file.open("rb") as handle:
        mapping = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        mapping[5:8] = b"new"
    found[0].drop()
    assert found[0].size == 0
    assert mapping[5:8] == b"new"


def test_mappings_of_others_are_kept(file: Path) -> None:
    with file.open("rb") as handle:
        before = mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ)
        with pages_dropped([file]) as found:
            pass
    assert found[0].size == 0
    assert before[:] == CONTENTS
    found[0].drop()
    assert resident(file) >= SIZE


def test_pages_of_the_graph_that_runs_stay_and_those_of_others_go(file: Path, copy: Path) -> None:
    (own, own_pages), (other, other_pages) = mapped(file, copy)
    limit = PageLimit(SIZE * 2, lambda: (own_pages, other_pages))
    limit.renew(own_pages, 1, is_copy=False)
    assert resident(file) == resident(copy) == 0
    assert own[:] == CONTENTS
    assert other[:] == CONTENTS * 2
    limit.renew(other_pages, 1, is_copy=False)
    assert resident(file) >= SIZE  # graphs that run in turns would read everything anew
    limit._dropped_at = 0.0
    limit.enforce()
    assert resident(file) == 0
    assert resident(copy) >= SIZE * 2
    assert own[:] == CONTENTS
    limit._dropped_at = 0.0
    limit.renew(own_pages, 1, is_copy=False)
    assert resident(copy) == 0


def test_nothing_of_a_copy_stays_and_while_it_is_read_a_part(
    file: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_large_page_bytes", lambda: 0)
    (own, own_pages), (other, copy_pages) = mapped(file, copy)
    both = MappedPages([*own_pages._mappings, *copy_pages._mappings])
    limit = PageLimit(SIZE * 2, lambda: (own_pages, both))
    limit.renew(both, 1, is_copy=True)
    assert own[:] == CONTENTS
    limit.enforce()
    assert resident(file) >= SIZE  # not too much
    assert other[:] == CONTENTS * 2
    limit.enforce()
    assert resident(copy) == 0  # the larger mapping goes first
    assert own[:] == CONTENTS
    limit.renew(own_pages, 1, is_copy=False)
    assert resident(file) == 0


def test_less_of_a_copy_stays_where_its_pages_are_large(
    file: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_large_page_bytes", lambda: 1 << 40)
    (own, own_pages), (other, copy_pages) = mapped(file, copy)
    both = MappedPages([*own_pages._mappings, *copy_pages._mappings])
    limit = PageLimit(SIZE * 6, lambda: (both,))
    limit.renew(both, 1, is_copy=True)
    assert own[:] == CONTENTS
    assert other[:] == CONTENTS * 2
    limit.enforce()
    assert resident(copy) == 0  # three files are less than seven eighths of six
    assert resident(file) >= SIZE


def test_large_packed_weights_are_read_in_large_pages_if_memory_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the system makes of it depends on the file system; here, what it is told."""
    (tmp_path / "model.onnx").write_bytes(b"kernel|%d;%d;1f|%d;%d;2e" % (LARGE_PAGE, 2 * LARGE_PAGE, 4096, 5000))
    with (tmp_path / "model.onnx.data").open("wb") as handle:
        handle.truncate(3 * LARGE_PAGE + 100)
    (tmp_path / "shorter.data").write_bytes(b"1")
    advised: list[tuple[int, ...]] = []

    class Mapping(mmap.mmap):
        def madvise(self, *arguments: int) -> None:
            advised.append((len(self), *arguments))
            super().madvise(*arguments)

    monkeypatch.setattr(mmap, "mmap", Mapping)
    monkeypatch.setattr(packed_files, "available_memory", lambda: 4 * LARGE_PAGE - 1)
    packed_files._read_in_large_pages(tmp_path)
    assert not advised
    monkeypatch.setattr(packed_files, "available_memory", lambda: 4 * LARGE_PAGE)
    packed_files._read_in_large_pages(tmp_path)
    size, huge, dropped = 3 * LARGE_PAGE + 100, mmap.MADV_HUGEPAGE, mmap.MADV_DONTNEED
    parts = [(size, dropped, place * LARGE_PAGE, LARGE_PAGE) for place in (1, 2)]
    assert sorted(advised) == sorted([(1, huge), (size, huge), *parts])


def test_packed_weights_are_dropped_while_a_session_is_loaded(copy: Path) -> None:
    packed = b"kernel|%d;%d;1f" % (SIZE, SIZE)
    with pages_dropped([copy], packed) as found, copy.open("rb") as handle:
        row = mmap.mmap(handle.fileno(), SIZE, prot=mmap.PROT_READ)
        whole = mmap.mmap(handle.fileno(), SIZE, prot=mmap.PROT_READ, offset=SIZE)
        assert row[:] == whole[:] == CONTENTS
        until = time.monotonic() + 60
        while resident(copy) > SIZE:
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(0.05)
        assert resident(copy) == SIZE, "what is not packed may have been unmapped"
    assert found[0].size == 2 * SIZE


def test_rows_of_what_is_not_packed_are_dropped_after_many_tokens(copy: Path) -> None:
    with pages_dropped([copy], b"kernel|%d;%d;1f" % (SIZE, SIZE)) as found, copy.open("rb") as handle:
        row = mmap.mmap(handle.fileno(), SIZE, prot=mmap.PROT_READ)
        whole = mmap.mmap(handle.fileno(), SIZE, prot=mmap.PROT_READ, offset=SIZE)
    limit = PageLimit(SIZE * 8, lambda: found)
    limit.renew(found[0], 1, is_copy=False)
    assert row[:] == whole[:] == CONTENTS
    limit.renew(found[0], 60, is_copy=False)
    assert resident(copy) == 2 * SIZE
    limit.renew(found[0], 60, is_copy=False)
    assert resident(copy) == SIZE
    assert row[:] == CONTENTS


def test_a_large_limit_is_kept_in_a_thread(tmp_path: Path) -> None:
    size = 80 << 20
    path = tmp_path / "large"
    with path.open("wb") as handle:
        handle.truncate(size)
    ((mapping, pages),) = mapped_zeros(path)
    limit = PageLimit(64 << 20, lambda: [pages])
    limit.renew(MappedPages(), 1, is_copy=False)
    assert mapping[:].count(0) == size
    until = time.monotonic() + 60
    while resident(path) >= size:
        assert time.monotonic() < until
        time.sleep(0.01)


def mapped_zeros(path: Path) -> Iterator[tuple[mmap.mmap, MappedPages]]:
    """A mapping of a file, and its pages."""
    with pages_dropped([path]) as found, path.open("rb") as handle:
        mapping = mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ)
    yield mapping, found[0]
