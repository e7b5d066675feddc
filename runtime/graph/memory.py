"""Giving back memory that loading needed and decoding does not.

Packing weights reads every page of the weights file; the pages then count as resident although nothing reads them again
(of a tied embedding only single rows). Reading a tokenizer leaves as much free heap behind as the tokenizer itself
takes. Linux lets a process give both back; elsewhere these functions do nothing.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Final

_MADV_DONTNEED: Final = 4


def trim_heap() -> None:
    """Return the C library's free heap to the system (glibc)."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def drop_file_pages(path: Path) -> int:
    """Drop this process's resident pages of a mapped file; they come back from the file when they are read.

    Mappings with pages of their own (written to since they were mapped) are left alone. Returns the bytes dropped.
    """
    if sys.platform != "linux":
        return 0
    wanted = str(path.resolve())
    try:
        text = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
        madvise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return 0
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    dropped = 0
    start, end, resident, own = 0, 0, 0, 0
    mapped = False
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        if name.endswith(":"):
            if name == "Rss:":
                resident = int(rest.split()[0]) << 10
            elif name == "Anonymous:":
                own = int(rest.split()[0])
            elif name == "VmFlags:" and mapped and resident and not own:
                dropped += resident if madvise(start, end - start, _MADV_DONTNEED) == 0 else 0
        else:
            start, end = (int(part, 16) for part in name.split("-"))
            mapped = line.endswith(wanted)
    return dropped
