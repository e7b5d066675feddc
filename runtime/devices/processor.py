"""Identifies this machine's processor, as part of cache keys."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path


@cache
def processor() -> str:
    """Architecture and instruction sets, which decide what kernels run and how weights are packed for them."""
    return f"{platform.system()}\0{platform.machine()}\0{platform.processor()}\0{_cpuinfo_line('flags', 'Features')}"


@cache
def machine() -> str:
    """What decides how fast kernels run: `processor`, the processor's model name and the number of cores."""
    return f"{processor()}\0{_cpuinfo_line('model name')}\0{os.cpu_count()}"


def _cpuinfo_line(*prefixes: str) -> str:
    """The first line of /proc/cpuinfo that starts with one of the prefixes; empty if there is none."""
    file = Path("/proc/cpuinfo")
    if not file.is_file():
        return ""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in lines if line.startswith(prefixes)), "")
