"""The chip, its instruction sets and the build of Python, as part of cache keys.

Python's `platform` module is not asked: on Windows it queries a service (WMI) from Python 3.12 on, which may hang or
fail, and it names neither the instruction sets nor, on a Mac, the chip.
"""

from __future__ import annotations

import ctypes
import os
import sys
import sysconfig
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

_CPU_INFO: Final = Path("/proc/cpuinfo")
_LINUX_NAMES: Final = ("CPU implementer", "CPU variant", "CPU part", "cpu", "uarch")
"""Lines of /proc/cpuinfo of a chip without a name; an ARM chip has numbers for its designer and its kinds of cores."""
_APPLE_FEATURES: Final = (
    *(f"hw.optional.arm.FEAT_{name}" for name in ("DotProd", "FP16", "I8MM", "BF16", "SME", "SME2")),
    *(f"hw.optional.{name}" for name in ("avx1_0", "avx2_0", "fma", "avx512f", "avx512vnni")),
)
_WINDOWS_FEATURES: Final = 128
"""Numbers of processor features that Windows is asked for; it knows fewer than 100."""
_WINDOWS_KEY: Final = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"


@cache
def build_platform() -> str:
    """The platform that this Python was built for, and the architecture that it runs as.

    An x64 Python that an ARM machine emulates differs from a native one. One file of Python for macOS holds both
    architectures, so the platform alone does not tell them apart.
    """
    return f"{sysconfig.get_platform()} {running_architecture()}".strip()


@cache
def running_architecture() -> str:
    """The architecture that this process runs as, such as x86_64 or arm64."""
    if sys.platform == "win32":
        architecture = os.environ.get("PROCESSOR_ARCHITECTURE", "") or sysconfig.get_platform().rpartition("-")[2]
    else:
        architecture = os.uname().machine
    return architecture


@cache
def chip_name() -> str:
    """The chip's name as the system gives it; empty where it gives none."""
    if sys.platform == "win32":
        name = windows_name(_windows_registry(), os.environ)
    elif sys.platform == "darwin":
        name = sysctl("machdep.cpu.brand_string").rstrip(b"\0").decode(errors="replace")
    else:
        name = linux_name(system_text(_CPU_INFO))
    return name


@cache
def chip_features() -> str:
    """The chip's instruction sets, as far as the system tells them."""
    if sys.platform == "win32":
        features = windows_features(ctypes.WinDLL("kernel32").IsProcessorFeaturePresent)
    elif sys.platform == "darwin":
        features = " ".join(name for name in _APPLE_FEATURES if any(sysctl(name)))
    else:
        features = linux_features(system_text(_CPU_INFO))
    return features


def linux_name(cpu_info: str) -> str:
    """Read the name from the text of /proc/cpuinfo; of a chip with several kinds of cores, all of them."""
    fields = _fields(cpu_info)
    names = [value for name, value in fields if name == "model name"]
    return ", ".join(dict.fromkeys(names or [f"{name} {value}" for name, value in fields if name in _LINUX_NAMES]))


def linux_features(cpu_info: str) -> str:
    """Read the instruction sets from the text of /proc/cpuinfo: those that all cores have, in one order."""
    cores = [set(value.split()) for name, value in _fields(cpu_info) if name in ("flags", "Features", "isa")]
    return " ".join(sorted(set.intersection(*cores))) if cores else ""


def _fields(cpu_info: str) -> list[tuple[str, str]]:
    parts = (line.partition(":") for line in cpu_info.splitlines())
    return [(name.strip(), value.strip()) for name, colon, value in parts if colon]


def windows_name(registry: str, environment: Mapping[str, str]) -> str:
    """Join the name in the registry and the identifier in the environment, which tells an emulated x64 chip."""
    return ", ".join(filter(None, (registry.strip(), environment.get("PROCESSOR_IDENTIFIER", ""))))


def windows_features(is_present: Callable[[int], int]) -> str:
    """Ask for every processor feature by its number; returns a mask in hexadecimal digits."""
    return f"{sum(1 << number for number in range(_WINDOWS_FEATURES) if is_present(number)):x}"


def system_text(file: Path) -> str:
    """The text of a file of the system, without space around it; empty if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def sysctl(name: str) -> bytes:
    """The value of macOS's `sysctl`; empty if there is none of this name."""
    buffer, size = ctypes.create_string_buffer(256), ctypes.c_size_t(256)
    try:
        function = ctypes.CDLL(None).sysctlbyname
    except (OSError, AttributeError):
        return b""
    failed = function(name.encode(), buffer, ctypes.byref(size), None, ctypes.c_size_t(0))
    return b"" if failed else buffer.raw[: size.value]


def _windows_registry() -> str:
    """The chip's name in the registry of Windows; empty where there is none."""
    if sys.platform == "win32":
        import winreg  # noqa: PLC0415  Windows only

        with suppress(OSError), winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, _WINDOWS_KEY) as key:
            return str(winreg.QueryValueEx(key, "ProcessorNameString")[0])
    return ""
