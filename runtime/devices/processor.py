"""Identifies this machine's processor, as part of cache keys, and counts the threads to compute with."""

from __future__ import annotations

import math
import os
from functools import cache

from .chip import build_platform, chip_features, chip_name
from .cores import Core, physical_cores
from .cpu_limits import allowed_cpus, cpu_quota


@cache
def processor() -> str:
    """Build, chip and instruction sets, which decide what kernels run and how weights are packed for them."""
    return "\0".join((build_platform(), chip_name(), chip_features()))


@cache
def machine() -> str:
    """What decides how fast kernels run: `processor` and the number of cores."""
    return f"{processor()}\0{os.cpu_count()}"


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
