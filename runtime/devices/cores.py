"""The processor's physical cores: which logical processors they have, and which cores are slow.

Some processors have two kinds of cores. A pass waits for its slowest thread, so threads on the slow kind make it
slower. ONNX Runtime counts all physical cores alike, therefore edge-run asks the system itself.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

_SLOW_BELOW: Final = 0.6
"""Share of the fastest core's capacity below which a core of an ARM processor counts as slow."""
_PROCESSOR_CORE: Final = 0
"""RelationProcessorCore of GetLogicalProcessorInformationEx."""


class Core(NamedTuple):
    """A physical core."""

    cpus: frozenset[int]
    """Numbers of its logical processors."""
    fast: bool = True
    """Whether it is a performance core; on processors with one kind of cores all are."""


@cache
def physical_cores() -> tuple[Core, ...]:
    """The cores of this machine; empty where the system does not tell them."""
    return _read_cores()


def linux_cores(devices: Path) -> tuple[Core, ...]:
    """Read the cores below `/sys/devices`.

    Processors of Intel with two kinds of cores list the fast ones in `cpu_core/cpus`; ARM processors give every logical
    processor a capacity, 1024 for the fastest.
    """
    siblings: dict[frozenset[int], int] = {}
    for folder in (devices / "system" / "cpu").glob("cpu[0-9]*"):
        topology = folder / "topology"
        cpus = cpu_list(_text(topology / "core_cpus_list") or _text(topology / "thread_siblings_list"))
        if cpus:
            capacity = _text(folder / "cpu_capacity")
            siblings[cpus] = int(capacity) if capacity.isdecimal() else 0
    fast = cpu_list(_text(devices / "cpu_core" / "cpus"))
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


def apple_cores(sysctl: Callable[[str], int | None]) -> tuple[Core, ...]:
    """Read the cores from the values of macOS's `sysctl`; `hw.perflevel0` is the fastest kind.

    macOS numbers no cores and lets no program choose among them, so the numbers are only an enumeration.
    """
    physical = sysctl("hw.physicalcpu") or 0
    fast = sysctl("hw.perflevel0.physicalcpu") or physical
    each = max((sysctl("hw.logicalcpu") or 0) // max(physical, 1), 1)
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


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _sysctl(name: str) -> int | None:
    """The value of a whole number of `sysctl`; None if there is none of this name."""
    value, size = ctypes.c_int64(0), ctypes.c_size_t(8)
    try:
        function = ctypes.CDLL(None).sysctlbyname
    except (OSError, AttributeError):
        return None
    failed = function(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    # The upper half of a value of 4 bytes stays zero, and Apple's processors store the lower half first.
    return None if failed else value.value


if sys.platform == "win32":

    def _read_cores() -> tuple[Core, ...]:
        function = ctypes.WinDLL("kernel32").GetLogicalProcessorInformationEx
        size = ctypes.c_uint32(0)
        function(_PROCESSOR_CORE, None, ctypes.byref(size))
        records = ctypes.create_string_buffer(max(size.value, 1))
        read = function(_PROCESSOR_CORE, records, ctypes.byref(size))
        return windows_cores(records.raw[: size.value]) if read else ()

elif sys.platform == "darwin":

    def _read_cores() -> tuple[Core, ...]:
        return apple_cores(_sysctl)

else:

    def _read_cores() -> tuple[Core, ...]:
        return linux_cores(Path("/sys/devices"))
