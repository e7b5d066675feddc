"""What tells this machine's processor from another's: part of the key of what is made for one of them."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path


@cache
def processor() -> str:
    """What decides which kernels run and how weights are packed for them: architecture and instruction sets."""
    return f"{platform.system()}\0{platform.machine()}\0{platform.processor()}\0{_line('flags', 'Features')}"


@cache
def machine() -> str:
    """What decides how fast they run, as far as it can be asked: also the processor's model and how many it has."""
    return f"{processor()}\0{_line('model name')}\0{os.cpu_count()}"


def _line(*names: str) -> str:
    """The first line of Linux's description of the processors that starts with one of the names."""
    about = Path("/proc/cpuinfo")
    if not about.is_file():
        return ""
    lines = about.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in lines if line.startswith(names)), "")
