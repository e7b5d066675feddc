"""Identifies this machine's processor, as part of cache keys, and counts the threads to compute with."""

from __future__ import annotations

import math
import os
import platform
from functools import cache
from pathlib import Path

from .cores import Core, physical_cores
from .cpu_limits import allowed_cpus, cpu_quota


@cache
def processor() -> str:
    """Architecture and instruction sets, which decide what kernels run and how weights are packed for them."""
    return f"{platform.system()}\0{platform.machine()}\0{platform.processor()}\0{_cpuinfo_line('flags', 'Features')}"


@cache
def machine() -> str:
    """What decides how fast kernels run: `processor`, the processor's model name and the number of cores."""
    return f"{processor()}\0{_cpuinfo_line('model name')}\0{os.cpu_count()}"


def usable_cores() -> int:
    """How many logical processors this process may use: at most so many threads run at the same time."""
    allowed = allowed_cpus()
    count = (os.cpu_count() or 1) if allowed is None else len(allowed)
    quota = cpu_quota()
    return count if quota is None else max(min(count, math.ceil(quota)), 1)


def usable_physical_cores() -> int:
    """How many physical cores have a logical processor that this process may use."""
    allowed = allowed_cpus()
    return sum(allowed is None or bool(core.cpus & allowed) for core in physical_cores()) or usable_cores()


def default_threads() -> int:
    """How many threads compute unless the user says otherwise: one per performance core that this process may use."""
    return threads_for(physical_cores(), allowed_cpus(), cpu_quota()) or usable_cores()


def threads_for(cores: tuple[Core, ...], allowed: frozenset[int] | None, quota: float | None) -> int:
    """Count the threads for a processor: one per fast core, or per slow one if none of the fast may be used.

    Args:
        cores: the physical cores.
        allowed: the logical processors that may be used; None for all.
        quota: how many processors' time may be used. It is rounded down: threads that exhaust it wait for the next
            period, and all others for them.

    Returns:
        The number of threads; 0 if the cores are not known.
    """
    usable = [core for core in cores if allowed is None or core.cpus & allowed]
    count = sum(core.fast for core in usable) or len(usable)
    return count if quota is None or count == 0 else max(min(count, math.floor(quota)), 1)


def _cpuinfo_line(*prefixes: str) -> str:
    """The first line of /proc/cpuinfo that starts with one of the prefixes; empty if there is none."""
    file = Path("/proc/cpuinfo")
    if not file.is_file():
        return ""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in lines if line.startswith(prefixes)), "")
