"""Returns memory to the system that nothing needs any more, or not now.

Packing weights reads every page of the weights file. The pages then count as resident although nothing reads them again
(except single rows of a tied embedding). Several graphs of one model map the same weights, or others, and most passes
need those of one graph. Reading a tokenizer leaves as much free heap behind as the tokenizer itself takes. On Linux a
process can return all of it; on other systems nothing is done here.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from mmap import PAGESIZE
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt

_MADV_DONTNEED, _MADV_HUGEPAGE = 4, 14
_SMALL: Final = 1 << 20
"""Bytes; listing what a process maps, with the pages of each mapping, costs more time than so little is worth."""
_INTERVAL_S: Final = 0.1
_TIGHT_INTERVAL_S: Final = 0.01
_AWAKE_S: Final = 10.0
"""Seconds after a pass for which a limit is kept."""
_LEAST_PAUSE_S: Final = 2.0
"""Seconds between two times at which a limit that is not tight is enforced: pages that are dropped are read anew."""
_LEAST_LIMIT: Final = 64 << 20
"""Bytes; less is not worth a thread."""
_TIGHT, _KEPT = 0.875, 0.7
"""Parts of a limit: what a tight one is, and what stays resident when it is exceeded. A pass reads its weights in the
same order each time, so it is best to keep the same ones."""

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
        _advise(start, size, _MADV_DONTNEED)


class MappedPages:
    """The pages of the weight files that one session maps.

    Attributes:
        size: bytes of the mappings.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._ranges: Final = sorted(ranges, key=lambda each: each[1])
        for start, size in self._ranges:
            _advise(start, size, _MADV_HUGEPAGE)
        self.size: Final = sum(size for _, size in self._ranges)

    def drop(self, kept: float = 0) -> None:
        """Drop those that are resident; only while the session is alive, because others may take its addresses.

        Args:
            kept: bytes that stay, those of the smallest mappings first: these cost most to read again.
        """
        for start, size in self._ranges:
            kept -= size
            if kept < 0:
                _advise(start, size, _MADV_DONTNEED)


@contextmanager
def pages_dropped(files: Iterable[Path]) -> Iterator[list[MappedPages]]:
    """Drop the pages of weight files that loading a session has read in the block.

    One block runs at a time: what another one maps meanwhile it may unmap again.

    Yields:
        A list, which has the pages that the session maps once the block has ended.
    """
    found: list[MappedPages] = []
    weights = list(files)
    with _loading:
        before = set(_unwritten(weights))
        yield found
        found.append(MappedPages(set(_unwritten(weights)) - before))
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
        self._copy: MappedPages | None = MappedPages()
        self._is_tight = False
        self._until = 0.0
        self._thread = threading.Thread()
        self._others = 0
        """Bytes of mapped files that are not the sessions'."""
        self._dropped_at = 0.0

    def renew(self, copy: MappedPages | None, *, tight: bool) -> None:
        """Keep the limit during the pass that follows.

        Args:
            copy: the pages that the pass reads, if they are a second copy of the weights, of which nothing stays when
                others are read.
            tight: whether a tight limit is kept, although some of the copy has to be read again then; for others, there
                is none.
        """
        if copy is not self._copy:
            self.drop()
        self._copy, self._is_tight, self._until = copy, tight, time.monotonic() + _AWAKE_S
        if _madvise is not None and self._size >= _LEAST_LIMIT and not self._thread.is_alive():
            self._thread = threading.Thread(
                target=_keep, args=(weakref.ref(self),), name="edge-run memory", daemon=True
            )
            self._thread.start()

    def enforce(self) -> float:
        """Drop pages if too many are resident; returns the seconds until this has to be asked again, 0 for never."""
        tight, now = self._is_tight, time.monotonic()
        ended = now > self._until
        size = self._size * _TIGHT if tight else self._size
        may_drop = tight or (self._copy is None and now - self._dropped_at > _LEAST_PAUSE_S)
        if may_drop and _resident_file_bytes() - self._others > size:
            self._dropped_at = now
            self._drop(self._copy)
        if ended and self._copy is not None:
            self.drop()
        return 0.0 if ended else _TIGHT_INTERVAL_S if tight else _INTERVAL_S

    def drop(self) -> None:
        """Drop all pages of the sessions, while none of them runs a pass."""
        self._drop()
        self._others = _resident_file_bytes()

    def _drop(self, copy: MappedPages | None = None) -> None:
        for each in self._pages():
            each.drop(self._size * _KEPT if each is copy else 0)


def _keep(limit: weakref.ref[PageLimit]) -> None:
    """Enforce a limit while it is renewed."""
    while (current := limit()) is not None and (seconds := current.enforce()):
        del current
        time.sleep(seconds)


def _advise(start: int, size: int, advice: int) -> None:
    if _madvise is not None:
        _madvise(start, size, advice)


def _resident_file_bytes() -> int:
    """Bytes of mapped files that are resident, shared memory included."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[2]) * PAGESIZE


def _unwritten(files: Iterable[Path]) -> Iterator[tuple[int, int]]:
    """Mappings of files of a mebibyte and more that were never written to: address and bytes."""
    try:
        names = tuple(str(file.resolve()) for file in files if file.is_file() and file.stat().st_size >= _SMALL)
        # Other systems have no such file.
        mappings = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace") if names else ""
    except OSError:
        return
    start, end, anonymous = 0, 0, 0
    is_of_file = False
    for line in mappings.splitlines():
        name, _, value = line.partition(" ")
        if name.endswith(":"):
            if name == "Anonymous:":
                anonymous = int(value.split()[0])
            elif name == "VmFlags:" and is_of_file and not anonymous:
                yield start, end - start
        else:
            start, end = (int(part, 16) for part in name.split("-"))
            is_of_file = line.endswith(names)
