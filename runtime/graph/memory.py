"""Returns memory to the system that only loading needed.

Packing weights reads every page of the weights file. The pages then count as resident although nothing reads them again
(except single rows of a tied embedding). Reading a tokenizer leaves as much free heap behind as the tokenizer itself
takes. On Linux a process can return both; on other systems these functions do nothing.
"""

from __future__ import annotations

import ctypes
import sys
from mmap import PAGESIZE
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt

_MADV_DONTNEED: Final = 4
_SMALL: Final = 1 << 20
"""Bytes; listing what a process maps, with the pages of each mapping, costs more time than so little is worth."""


_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


def trim_heap() -> None:
    """Return the C library's free heap to the system (glibc)."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def drop_array_pages(array: npt.NDArray[Any]) -> None:
    """Give back the memory of an array that nobody reads any more, whoever still refers to it; it then holds zeros."""
    start = -(-array.ctypes.data // PAGESIZE) * PAGESIZE
    size = (array.ctypes.data + array.nbytes - start) // PAGESIZE * PAGESIZE
    if _madvise is not None and array.flags.c_contiguous and size > _SMALL:
        _madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_DONTNEED)


def drop_file_pages(path: Path) -> int:
    """Drop this process's resident pages of a mapped file; reading them loads them from the file again.

    Mappings that were written to (with anonymous pages) are left alone, and so are files below a mebibyte.

    Returns:
        Number of bytes dropped.
    """
    file_name = str(path.resolve())
    try:
        if path.stat().st_size < _SMALL:
            return 0
        # Other systems have no such file.
        mappings = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
        madvise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return 0
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    dropped = 0
    start, end, resident, anonymous = 0, 0, 0, 0
    is_of_file = False
    for line in mappings.splitlines():
        name, _, value = line.partition(" ")
        if name.endswith(":"):
            if name == "Rss:":
                resident = int(value.split()[0]) << 10
            elif name == "Anonymous:":
                anonymous = int(value.split()[0])
            elif name == "VmFlags:" and is_of_file and resident and not anonymous:
                dropped += resident if madvise(start, end - start, _MADV_DONTNEED) == 0 else 0
        else:
            start, end = (int(part, 16) for part in name.split("-"))
            is_of_file = line.endswith(file_name)
    return dropped
