"""Returns memory to the system that nothing needs any more, or not now.

Packing weights reads every page of the weights file. The pages then count as resident although nothing reads them again
(except single rows of a tied embedding). Several graphs of one model map the same weights, or others, and most passes
need those of one graph. Reading a tokenizer leaves as much free heap behind as the tokenizer itself takes. On Linux a
process can return all of it; on other systems nothing is done here.
"""

from __future__ import annotations

import ctypes
import math
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from mmap import PAGESIZE
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy.typing as npt

_MADV_DONTNEED, _MADV_HUGEPAGE, _MADV_NOHUGEPAGE = 4, 14, 15
_SMALL: Final = 1 << 20
"""Bytes; listing what a process maps, with the pages of each mapping, costs more time than so little is worth."""
_INTERVAL_S: Final = 0.1
_TIGHT_INTERVAL_S: Final = 0.01
_AWAKE_S: Final = 10.0
"""Seconds after a pass for which a limit is kept."""
_LEAST_PAUSE_S: Final = 2.0
"""Seconds between two times at which a limit that is not tight is enforced: pages that are dropped are read anew."""
_MANY_ROWS: Final = 64
"""Rows of the embedding that may have been read before its pages are dropped: with a row, the system maps 64 KB."""
PACKED: Final = re.compile(rb"\|(\d{1,18});(\d{1,18});")
"""Where a packed form of a tensor begins in a data file, and how many bytes it has, as a model file says it."""
_LEAST_LIMIT: Final = 64 << 20
"""Bytes; less is not worth a thread."""
_TIGHT, _KEPT, _LESS = 0.875, 0.7, 0.5
"""Parts of a limit: what a tight one is, what stays resident when it is exceeded, and how much less both are if all
pages are large, which are read again in next to no time. A pass reads its weights in the same order each time, so it is
best to keep the same ones."""

_libc: Final = ctypes.CDLL(None) if sys.platform == "linux" else None
_malloc_trim: Final = getattr(_libc, "malloc_trim", None)
_madvise: Final = getattr(_libc, "madvise", None)
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_loading: Final = threading.RLock()


def trim_heap() -> None:
    """Return the C library's free heap to the system (glibc)."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def drop_array_pages(array: npt.NDArray[Any]) -> None:
    """Give back the memory of an array that nobody reads any more, whoever still refers to it; it then holds zeros."""
    start = -(-array.ctypes.data // PAGESIZE) * PAGESIZE
    size = (array.ctypes.data + array.nbytes - start) // PAGESIZE * PAGESIZE
    if array.flags.c_contiguous and size > _SMALL:
        _advise(FileMapping(start, size, 0), _MADV_DONTNEED)


class FileMapping(NamedTuple):
    """Where a part of a file is mapped: address, bytes, and where the part begins in the file."""

    start: int
    size: int
    offset: int


class MappedPages:
    """The pages of the weight files that one session maps.

    Args:
        mappings: what it maps.
        packed: where packed weights begin in the files; of a model that has them, only rows of others are read.

    Attributes:
        size: bytes of the mappings.
    """

    def __init__(self, mappings: Iterable[FileMapping] = (), packed: Collection[int] = ()) -> None:
        self._mappings: Final = sorted(mappings, key=lambda each: each.size)
        self._rows: Final = [
            each for each in self._mappings if packed and each.offset not in packed and each.size > _SMALL
        ]
        for each in self._mappings:
            _advise(each, _MADV_NOHUGEPAGE if each in self._rows else _MADV_HUGEPAGE)
        self.size: Final = sum(each.size for each in self._mappings)

    def drop(self, kept: float = 0) -> None:
        """Drop those that are resident; only while the session is alive, because others may take its addresses.

        Args:
            kept: bytes that stay, those of the smallest mappings first: these cost most to read again.
        """
        for each in self._mappings:
            kept -= each.size
            if kept < 0:
                _advise(each, _MADV_DONTNEED)

    def drop_rows(self) -> None:
        """Drop those of which single rows are read, such as the embedding's."""
        for each in self._rows:
            _advise(each, _MADV_DONTNEED)


@contextmanager
def pages_dropped(files: Iterable[Path], model: bytes = b"") -> Iterator[list[MappedPages]]:
    """Drop the pages of weight files that loading a session reads in the block, those of packed weights meanwhile.

    One block runs at a time: what another one maps meanwhile it may unmap again.

    Args:
        files: the weight files.
        model: the serialized model, which says where in them packed weights lie.

    Yields:
        A list, which has the pages that the session maps once the block has ended.
    """
    found: list[MappedPages] = []
    weights, packed, ended = list(files), {int(start) for start, _ in PACKED.findall(model)}, threading.Event()
    with _loading:
        before = set(_mappings(weights, "smaps"))

        def drop_packed() -> None:
            # Other weights are unmapped as soon as they are packed, and memory of any use may take their addresses.
            while not ended.wait(_TIGHT_INTERVAL_S):
                for each in set(_mappings(weights, "maps")) - before:
                    if each.offset in packed:
                        _advise(each, _MADV_DONTNEED)

        thread = threading.Thread(target=drop_packed, name="edge-run memory", daemon=True)
        if packed:
            thread.start()
        try:
            yield found
        finally:
            ended.set()
            if packed:
                thread.join()
        found.append(MappedPages(set(_mappings(weights, "smaps")) - before, packed))
    found[0].drop()
    trim_heap()


class PageLimit:
    """Holds down how much of the weights that some sessions map is resident, in a thread, while passes run.

    Args:
        size: bytes that may be resident.
        pages: returns the pages of the sessions, which stay alive while what it returned is used.
    """

    def __init__(self, size: int, pages: Callable[[], Iterable[MappedPages]]) -> None:
        self._size: Final = size
        self._pages: Final = pages
        self._current = MappedPages()
        """Those of the graph that runs."""
        self._is_copy = False
        self._large: float | None = None
        """Share of the copy that is in pages of 2 MB; None until it is known."""
        self._rows_read = 0
        self._until = 0.0
        self._thread = threading.Thread()
        self._woken: Final = threading.Event()
        self._others = 0
        """Bytes of mapped files that are not the sessions'."""
        self._dropped_at = 0.0

    def renew(self, current: MappedPages, tokens: int, *, is_copy: bool) -> None:
        """Keep the limit during the pass that follows.

        Args:
            current: the pages that the pass reads; those of the graph that ran before are dropped.
            tokens: number of the pass's tokens, of each of which a row of the embedding is read.
            is_copy: whether they are a second copy of the weights, of which nothing stays when others are read. The
                limit is a tight one then, although some of the copy has to be read again.
        """
        if current is not self._current:
            # Graphs that run in turns, as those for other widths do, would read everything anew each time.
            if is_copy or self._is_copy or time.monotonic() - self._dropped_at > _LEAST_PAUSE_S:
                self.drop()
            if self._is_copy:
                self._dropped_at = 0.0  # a pass of the copy that an idle thread runs may go on for a moment
            self._current, self._is_copy, self._large = current, is_copy, None
            self._woken.set()
        self._rows_read += tokens
        if self._rows_read > _MANY_ROWS:
            self._rows_read = tokens
            for each in self._pages():
                each.drop_rows()
        self._until = time.monotonic() + _AWAKE_S
        if _madvise is not None and self._size >= _LEAST_LIMIT and not self._thread.is_alive():
            self._thread = threading.Thread(
                target=_keep, args=(weakref.ref(self), self._woken), name="edge-run memory", daemon=True
            )
            self._thread.start()

    def enforce(self) -> float:
        """Drop pages if too many are resident; returns the seconds until this has to be asked again, 0 for never."""
        tight, now = self._is_copy, time.monotonic()
        ended, resident = now > self._until, _resident_file_bytes() - self._others
        if tight and self._large is None and resident > self._size * (_TIGHT - _LESS):
            self._large = min(_large_page_bytes() / resident, 1.0)
        less = _LESS * (self._large or 0.0)
        may_drop = tight or now - self._dropped_at > _LEAST_PAUSE_S
        if may_drop and resident > self._size * (_TIGHT - less if tight else 1.0):
            self._drop(self._size * (_KEPT - less) if tight else math.inf)
        if ended and tight:
            self.drop()
        return 0.0 if ended else _TIGHT_INTERVAL_S if tight else _INTERVAL_S

    def drop(self) -> None:
        """Drop all pages of the sessions, while none of them runs a pass."""
        self._drop()
        self._others = _resident_file_bytes()

    def _drop(self, kept: float = 0) -> None:
        """Drop the pages of all sessions, but for so many bytes of the graph that runs."""
        self._dropped_at = time.monotonic()
        for each in self._pages():
            each.drop(kept if each is self._current else 0)


def _keep(limit: weakref.ref[PageLimit], woken: threading.Event) -> None:
    """Enforce a limit while it is renewed, at once where it has become another one."""
    while (current := limit()) is not None and (seconds := current.enforce()):
        del current
        woken.wait(seconds)
        woken.clear()


def _advise(where: FileMapping, advice: int) -> None:
    if _madvise is not None:
        _madvise(where.start, where.size, advice)


def _resident_file_bytes() -> int:
    """Bytes of mapped files that are resident, shared memory included."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[2]) * PAGESIZE


def _large_page_bytes() -> int:
    """Bytes of mapped files that are resident in pages of 2 MB."""
    try:
        rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("FilePmdMapped:"))


def _mappings(files: Iterable[Path], table: str) -> Iterator[FileMapping]:
    """Mappings of files of a mebibyte and more; the slow table `smaps`, unlike `maps`, shows which were written to."""
    try:
        names = tuple(str(file.resolve()) for file in files if file.is_file() and file.stat().st_size >= _SMALL)
        # Other systems have no such file.
        lines = Path("/proc/self", table).read_text(encoding="utf-8", errors="replace").splitlines() if names else []
    except OSError:
        return
    found = None
    for line in [*lines, "0-0"]:
        name, _, value = line.partition(" ")
        if name == "Anonymous:" and int(value.split()[0]):
            found = None
        elif not name.endswith(":"):
            if found is not None:
                yield found
            start, end = (int(part, 16) for part in name.split("-"))
            is_of_file = line.endswith(names)
            found = FileMapping(start, end - start, int(value.split()[1], 16)) if is_of_file else None
