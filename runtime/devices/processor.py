"""This machine's processor: its identity in cache keys, its cores, what of it this process may use, and how it is used.

Some processors have two kinds of cores. A pass waits for its slowest thread, so threads on the slow kind make it
slower. ONNX Runtime counts all physical cores alike, therefore edge-run asks the system itself. The process may be kept
from some cores by its CPU affinity or its container's CPU quota. `Power` is how a model is run: as fast as possible, or
with little processor time (docs/decisions/0045-power.md).
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil

from .chip import build_platform, chip_features, chip_name, sysctl, system_text

_SLOW_BELOW: Final = 0.6
"""Share of the fastest core's capacity below which a core of an ARM processor counts as slow."""
_PROCESSOR_CORE: Final = 0
"""RelationProcessorCore of GetLogicalProcessorInformationEx."""


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


def cpu_quota(root: Path = Path("/")) -> float | None:
    """How many processors' time the control groups of this process allow it; None for no limit.

    Args:
        root: the folder with `proc` and `sys`.
    """
    quotas = map(_quota, _control_groups("cpu", root))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(group: Path) -> float | None:
    """The quota of one control group, in processors."""
    second = " ".join(system_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    try:
        quota, period = (system_text(group / "cpu.max") or second).split()
        processors = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return processors if processors > 0 else None


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process can still take, on the machine and in its control groups.

    What only caches files counts as free.

    Args:
        root: the folder with `proc` and `sys`.
    """
    rooms = map(_room, _control_groups("memory", root))
    return max(min([psutil.virtual_memory().available, *(room for room in rooms if room is not None)]), 0)


def _room(group: Path) -> int | None:
    """Bytes of memory that one control group leaves its processes."""

    def amount(*names: str) -> int:
        return int(next(filter(None, (system_text(group / f"memory.{name}") for name in names)), ""))

    try:
        stat = dict(line.split() for line in system_text(group / "memory.stat").splitlines())
        cached = sum(int(stat.get(f"total_{name}") or stat[name]) for name in ("inactive_file", "active_file"))
        return amount("max", "limit_in_bytes") - amount("current", "usage_in_bytes") + cached
    except (ValueError, KeyError):
        return None


def _control_groups(controller: str, root: Path) -> Iterator[Path]:
    """Folders of the control groups (cgroups) that may limit what a controller counts for this process."""
    for line in system_text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0":
            mounts = [root / "sys/fs/cgroup"]
        elif controller in controllers.split(","):
            mounts = [root / "sys/fs/cgroup" / name for name in (controllers, controller)]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        # Inside a container the path may be the host's, while the mount holds the container's own group.
        yield from (mount.joinpath(*parts[:depth]) for mount in mounts for depth in range(len(parts) + 1))


def allowed_cpus() -> frozenset[int] | None:
    """Numbers of the logical processors that this process may run on; None where the system does not tell (macOS)."""
    allowed: frozenset[int] = frozenset()
    if sys.platform == "win32":
        with suppress(OSError, psutil.Error):
            allowed = frozenset(psutil.Process().cpu_affinity())
    elif sys.platform != "darwin":
        allowed = frozenset(os.sched_getaffinity(0))
    return allowed or None


class Core(NamedTuple):
    """A physical core."""

    cpus: frozenset[int]
    """Numbers of its logical processors."""
    fast: bool = True
    """Whether it is a performance core; on processors with one kind of cores all are."""


@cache
def physical_cores() -> tuple[Core, ...]:
    """The cores of this machine; empty where the system does not tell them."""
    if sys.platform == "win32":
        function = ctypes.WinDLL("kernel32").GetLogicalProcessorInformationEx
        size = ctypes.c_uint32(0)
        function(_PROCESSOR_CORE, None, ctypes.byref(size))
        records = ctypes.create_string_buffer(max(size.value, 1))
        read = function(_PROCESSOR_CORE, records, ctypes.byref(size))
        cores = windows_cores(records.raw[: size.value]) if read else ()
    elif sys.platform == "darwin":
        # Apple's processors store the lower bytes of a number first.
        cores = apple_cores(lambda name: int.from_bytes(sysctl(name), "little"))
    else:
        cores = linux_cores(Path("/sys/devices"))
    return cores


def linux_cores(devices: Path) -> tuple[Core, ...]:
    """Read the cores below `/sys/devices`.

    Processors of Intel with two kinds of cores list the fast ones in `cpu_core/cpus`; ARM processors give every logical
    processor a capacity, 1024 for the fastest.
    """
    siblings: dict[frozenset[int], int] = {}
    for folder in (devices / "system" / "cpu").glob("cpu[0-9]*"):
        topology = folder / "topology"
        cpus = cpu_list(system_text(topology / "core_cpus_list") or system_text(topology / "thread_siblings_list"))
        if cpus:
            capacity = system_text(folder / "cpu_capacity")
            siblings[cpus] = int(capacity) if capacity.isdecimal() else 0
    fast = cpu_list(system_text(devices / "cpu_core" / "cpus"))
    least = _SLOW_BELOW * max(siblings.values(), default=0)
    return tuple(
        Core(cpus, bool(cpus & fast) if fast else capacity >= least)
        for cpus, capacity in sorted(siblings.items(), key=lambda entry: min(entry[0]))
    )


def cpu_list(text: str) -> frozenset[int]:
    """Read a list of Linux such as `0-3,8,10-11`; empty for anything else."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()):
            return frozenset()
        numbers.update(range(int(first), int(last) + 1))
    return frozenset(numbers)


def apple_cores(number: Callable[[str], int]) -> tuple[Core, ...]:
    """Read the cores from the values of macOS's `sysctl`, 0 for unknown names; `hw.perflevel0` is the fastest kind.

    macOS numbers no cores and lets no program choose among them, so the numbers are only an enumeration.
    """
    physical = number("hw.physicalcpu")
    fast = number("hw.perflevel0.physicalcpu") or physical
    each = max(number("hw.logicalcpu") // max(physical, 1), 1)
    return tuple(Core(frozenset(range(core * each, (core + 1) * each)), core < fast) for core in range(physical))


def windows_cores(records: bytes) -> tuple[Core, ...]:
    """Read the cores from records of Windows's `GetLogicalProcessorInformationEx`; the highest class is the fastest.

    A logical processor has the number 64 * group + number in the group.
    """
    word = struct.calcsize("P")
    cores: list[tuple[frozenset[int], int]] = []
    start = 0
    while start + 8 <= len(records):
        relation, size = struct.unpack_from("<II", records, start)
        if size < 8 or start + size > len(records):
            break
        if relation == _PROCESSOR_CORE:
            efficiency_class = records[start + 9]
            (groups,) = struct.unpack_from("<H", records, start + 30)
            cpus: set[int] = set()
            for place in range(start + 32, start + 32 + groups * (word + 8), word + 8):
                mask = int.from_bytes(records[place : place + word], "little")
                (group,) = struct.unpack_from("<H", records, place + word)
                cpus |= {64 * group + bit for bit in range(8 * word) if mask >> bit & 1}
            cores.append((frozenset(cpus), efficiency_class))
        start += size
    fastest = max((efficiency_class for _, efficiency_class in cores), default=0)
    return tuple(Core(cpus, efficiency_class == fastest) for cpus, efficiency_class in cores)


class Power(StrEnum):
    """What a model's passes are to be: fast, or cheap in processor time and so in energy. The text is the same."""

    AUTO = "auto"
    """`SAVER` if the machine runs on its battery when the model is loaded, else `PERFORMANCE`."""
    PERFORMANCE = "performance"
    """One thread for each performance core. They spin while they wait for the next pass, 60 ms at most."""
    SAVER = "saver"
    """Half as many threads, which sleep between passes."""

    @property
    def saves(self) -> bool:
        """Whether processor time is saved."""
        return self is Power.SAVER


def choose_power(wanted: str) -> Power:
    """The mode to run in, `PERFORMANCE` or `SAVER`.

    Args:
        wanted: the mode that was asked for, or its name.
    """
    if (power := Power(wanted)) is Power.AUTO:
        return Power.SAVER if on_battery() else Power.PERFORMANCE
    return power


def battery() -> Any:
    """What psutil says of this machine's battery; None where it has none, or the system does not tell."""
    try:
        return psutil.sensors_battery()
    except (AttributeError, OSError, RuntimeError, ValueError):  # a system without such a sensor, or a sandbox
        return None


def on_battery() -> bool:
    """Whether this machine runs on its battery now; False where it has none, or the system does not tell."""
    return getattr(battery(), "power_plugged", None) is False


def saver_threads() -> int:
    """How many threads compute when processor time is saved."""
    return max(default_threads() // 2, 1)
