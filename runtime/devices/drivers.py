"""Identifies a device with its driver and plugin, as part of keys of what was measured on it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

from .providers import CPU_PROVIDER, Device

_NVIDIA: Final = Path("/sys/module/nvidia/version")
_VULKAN_DRIVERS: Final = (
    Path("/usr/share/vulkan/icd.d"),
    Path("/etc/vulkan/icd.d"),
    Path("/usr/local/share/vulkan/icd.d"),
)
_VULKAN_VARIABLES: Final = ("VK_ICD_FILENAMES", "VK_DRIVER_FILES", "VK_ADD_DRIVER_FILES")
"""Environment variables that choose the Vulkan driver."""
DISPLAY_ADAPTERS: Final = r"SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"
"""Key of Windows's registry with the display adapters, one numbered key each."""
COMPUTE_ACCELERATORS: Final = r"SYSTEM\CurrentControlSet\Control\Class\{f01a9d53-3ff6-48d2-9f97-c8a7004be10c}"
"""The same of NPUs."""


def device_identity(device: Device) -> tuple[str, ...]:
    """What results on a device depend on besides the model: provider, plugin, hardware, driver.

    On the CPU the provider alone, since `processor` and the version of ONNX Runtime say the rest.
    """
    if device.provider == CPU_PROVIDER:
        return (device.provider,)
    parts = [device.provider, str(device.index), device.plugin_version]
    if device.handle is not None:
        hardware = device.handle.device
        parts += [str(hardware.vendor_id), str(hardware.device_id)]
        parts += [f"{name}={value}" for name, value in sorted(hardware.metadata.items())]
        parts += [f"{name}={value}" for name, value in sorted(device.handle.ep_metadata.items()) if "path" not in name]
    return (*parts, *driver_versions())


@cache
def driver_versions() -> tuple[str, ...]:
    """What the system tells about the drivers of its GPUs and NPUs: versions, or the times of their files."""
    if sys.platform == "win32":
        keys = (DISPLAY_ADAPTERS, COMPUTE_ACCELERATORS)
        found = tuple(f"{each['DriverDesc']} {each['DriverVersion']}" for key in keys for each in windows_adapters(key))
    elif sys.platform == "darwin":
        found = (os.uname().release,)  # drivers are part of macOS
    else:
        found = tuple(_linux_drivers())
    return found


def _linux_drivers() -> Iterator[str]:
    with suppress(OSError):
        yield f"nvidia {_NVIDIA.read_text(encoding='ascii').strip()}"
    yield from (f"{name}={os.environ[name]}" for name in _VULKAN_VARIABLES if name in os.environ)
    for folder in _VULKAN_DRIVERS:
        for file in sorted(folder.glob("*.json")):
            with suppress(OSError):
                yield f"{file} {file.stat().st_mtime_ns}"


def windows_adapters(key: str) -> list[dict[str, str]]:
    """Description, hardware id and driver version of the adapters below a key of Windows's registry."""
    found: list[dict[str, str]] = []
    if sys.platform == "win32":
        import winreg  # noqa: PLC0415  Windows only

        with suppress(OSError), winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, key) as adapters:
            for number in range(winreg.QueryInfoKey(adapters)[0]):
                with suppress(OSError), winreg.OpenKey(adapters, winreg.EnumKey(adapters, number)) as adapter:
                    names = ("DriverDesc", "MatchingDeviceId", "DriverVersion")
                    found.append({name: str(winreg.QueryValueEx(adapter, name)[0]) for name in names})
    return found
