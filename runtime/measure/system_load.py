"""Measures how many processors other programs use, for measurements that they would disturb.

The system counts the busy time of its processors, and the process its own; the difference belongs to other programs. On
Linux it agrees within a few hundredths with the time that the kernel says the threads of a measurement waited.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from ..devices.cpu_limits import allowed_cpus
from ..devices.processor import default_threads, usable_physical_cores

_FREE_CORES: Final = 0.25
"""Processors that other programs may use beyond those that a measurement leaves unused: an idle desktop does."""
_FREE_SHARE: Final = 0.1
"""The same as a share of the measurement's threads, whichever is more."""
_TICK_ERROR_S: Final = 0.02
"""Error of the times of one processor: most systems count them in ticks of 10 to 16 ms."""


class ProcessorTimes(NamedTuple):
    """Seconds since some moment."""

    elapsed: float
    busy: float
    """Time that all programs together had on the processors that this process may use."""
    own: float
    """Time that this process had."""


class LoadMeter:
    """Measures the load of other programs from its creation on.

    Args:
        threads: number of threads that this process computes with meanwhile; 0 for `default_threads`.
        read: reads the times; None where the system does not tell them.
    """

    def __init__(self, threads: int = 0, read: Callable[[], ProcessorTimes | None] | None = None) -> None:
        self._threads = threads or default_threads()
        self._read = read_times if read is None else read
        self._start = self._read()

    def others(self) -> float | None:
        """Mean number of processors that other programs used; None where the system does not tell it."""
        return self._others()[0]

    @property
    def is_busy(self) -> bool:
        """Whether other programs took processors that the threads need; False where the system does not tell."""
        others, elapsed = self._others()
        if others is None:
            return False
        cores = usable_physical_cores()
        unused = max(cores - self._threads, 0)
        return others > unused + max(_FREE_CORES, _FREE_SHARE * self._threads) + _TICK_ERROR_S * cores / elapsed

    def wait(self, seconds: float) -> None:
        """Wait until the meter has run for so many seconds: the shorter the time, the less is known about the load."""
        time.sleep(max(seconds - self._others()[1], 0.0))

    def _others(self) -> tuple[float | None, float]:
        """What `others` returns, and the seconds since this meter was made."""
        now = self._read()
        if self._start is None or now is None or now.elapsed <= self._start.elapsed:
            return None, 0.0
        elapsed = now.elapsed - self._start.elapsed
        # What this process computes besides its own measurement disturbs it like another program.
        own = min(now.own - self._start.own, self._threads * elapsed)
        return max(now.busy - self._start.busy - own, 0.0) / elapsed, elapsed


def read_times() -> ProcessorTimes | None:
    """Read the times of the system and of this process; None where the system does not tell them."""
    busy = _busy_seconds()
    return None if busy is None else ProcessorTimes(time.perf_counter(), busy, time.process_time())


def linux_busy_ticks(stat: str, cpus: frozenset[int] | None) -> int:
    """Sum the busy ticks of some processors, None for all, in the text of `/proc/stat`.

    Time that a hypervisor gave to other guests (steal) counts as busy.
    """
    ticks = 0
    for line in stat.splitlines():
        name, *fields = line.split()
        number = name.removeprefix("cpu")
        if name.startswith("cpu") and number.isdecimal() and (cpus is None or int(number) in cpus):
            user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks


if sys.platform == "win32":

    def _busy_seconds() -> float | None:
        idle, kernel, user = ctypes.c_uint64(0), ctypes.c_uint64(0), ctypes.c_uint64(0)
        read = ctypes.WinDLL("kernel32").GetSystemTimes
        if not read(ctypes.byref(idle), ctypes.byref(kernel), ctypes.byref(user)):
            return None
        return (kernel.value + user.value - idle.value) * 1e-7  # kernel time contains the idle time

elif sys.platform == "darwin":

    def _busy_seconds() -> float | None:
        try:
            system = ctypes.CDLL(None)
            host = _host(system)
            ticks, count = (ctypes.c_uint32 * 4)(), ctypes.c_uint32(4)
            failed = system.host_statistics(ctypes.c_uint32(host), 3, ticks, ctypes.byref(count))
        except (OSError, AttributeError):
            return None
        user, kernel, _idle, nice = ticks
        return None if failed else (user + kernel + nice) / os.sysconf("SC_CLK_TCK")

    def _host(system: ctypes.CDLL) -> int:
        """The port of this host. Every call of mach_host_self takes a reference, so it is made once."""
        if not _HOST:
            _HOST.append(int(system.mach_host_self()))
        return _HOST[0]

    _HOST: Final[list[int]] = []

else:

    def _busy_seconds() -> float | None:
        try:
            stat = Path("/proc/stat").read_text(encoding="ascii", errors="replace")
            return linux_busy_ticks(stat, allowed_cpus()) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError):
            return None
