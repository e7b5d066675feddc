"""The GPUs and NPUs that the system shows, whether or not an installed package can use them.

Only hardware of known makers counts: virtual machines have display adapters too, and nothing is made up from less than
the system's own lists.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...models.manifest import DeviceKind
from .chip import running_architecture, system_text
from .packages import package_of
from .providers import COMPUTE_ACCELERATORS, DISPLAY_ADAPTERS, Device, windows_adapters

_INTEL: Final = "Intel"
_NVIDIA: Final = "NVIDIA"
_GPU_MAKERS: Final = {0x10DE: _NVIDIA, 0x1002: "AMD", 0x8086: _INTEL, 0x5143: "Qualcomm", 0x13B5: "ARM"}
"""Makers by the vendor id of the PCI bus."""
_NPU_MAKERS: Final = {0x8086: _INTEL, 0x1022: "AMD", 0x5143: "Qualcomm"}
_SOC_DRIVERS: Final = {"msm": "Qualcomm", "panfrost": "ARM", "panthor": "ARM", "lima": "ARM", "v3d": "Broadcom"}
"""Makers of GPUs that are part of a chip and on no bus, by the name of their Linux driver."""
_VENDOR: Final = re.compile(r"ven_([0-9a-f]{4})", re.IGNORECASE)


@dataclass(frozen=True)
class Hardware:
    """A GPU or NPU."""

    kind: DeviceKind
    vendor: str
    where: str
    """What shows it: a file of Linux, or a name that the system gives."""

    def __str__(self) -> str:
        return f"{self.vendor} {self.kind.name}"

    @property
    def installs(self) -> tuple[str, ...]:
        """Commands that install a package which can use it, the most general first."""
        if self.kind is DeviceKind.GPU:
            own = {"CUDA": self.vendor == _NVIDIA, "Dml": sys.platform == "win32"}
            providers = ["WebGpu", *(name for name, fits in own.items() if fits)]
        else:
            providers = {_INTEL: ["OpenVINO"], "Qualcomm": ["QNN"]}.get(self.vendor, [])
        return tuple(package.install for package in map(package_of, providers) if package is not None)


def seen_hardware() -> list[Hardware]:
    """The GPUs and NPUs of this machine, as far as its system shows them."""
    if sys.platform == "win32":
        gpus = windows_hardware(windows_adapters(DISPLAY_ADAPTERS), DeviceKind.GPU)
        found = [*gpus, *windows_hardware(windows_adapters(COMPUTE_ACCELERATORS), DeviceKind.NPU)]
    elif sys.platform == "darwin":
        # Every Mac with an Apple chip has a GPU; those with Intel's differ.
        is_apple = running_architecture() == "arm64"
        found = [Hardware(DeviceKind.GPU, "Apple", "the chip")] if is_apple else []
    else:
        found = linux_hardware(Path("/"))
    return found


def unused_hardware(seen: Sequence[Hardware], devices: Sequence[Device]) -> list[Hardware]:
    """What no device uses. Simulated devices use no hardware.

    Args:
        seen: what the system shows.
        devices: what sessions can run on.
    """
    used = {(device.kind, device.vendor.lower()) for device in devices if not device.simulated}
    # A provider without a list of devices names no vendor; it stands for any hardware of its kind.
    kinds = {kind for kind, vendor in used if not vendor}
    return [
        each
        for each in seen
        if each.kind not in kinds
        and not any(kind is each.kind and each.vendor.lower() in vendor for kind, vendor in used)
    ]


def linux_hardware(root: Path) -> list[Hardware]:
    """Read GPUs and NPUs from `/sys` and `/dev` below `root`."""
    found = [*_of_class(root, "drm", "card[0-9]*", DeviceKind.GPU, _GPU_MAKERS)]
    found += _of_class(root, "accel", "accel[0-9]*", DeviceKind.NPU, _NPU_MAKERS)
    if not any(each.vendor == _NVIDIA for each in found):
        # Containers are often given the devices of NVIDIA's driver without the rest of /sys.
        names = sorted(path for path in (root / "dev").glob("nvidia[0-9]*") if path.name[6:].isdecimal())
        found += [Hardware(DeviceKind.GPU, _NVIDIA, f"/dev/{path.name}") for path in names]
    return found


def _of_class(root: Path, name: str, pattern: str, kind: DeviceKind, makers: dict[int, str]) -> Iterator[Hardware]:
    """The hardware of a class of devices; connectors of a card, such as `card0-HDMI-A-1`, are left out."""
    for entry in sorted((root / "sys" / "class" / name).glob(pattern)):
        if not entry.name.removeprefix(name if name == "accel" else "card").isdecimal():
            continue
        number = system_text(entry / "device" / "vendor").removeprefix("0x")
        vendor = makers.get(int(number, 16)) if re.fullmatch("[0-9a-fA-F]+", number) else None
        if vendor is None and kind is DeviceKind.GPU:
            lines = system_text(entry / "device" / "uevent").splitlines()
            driver = next((line.partition("=")[2] for line in lines if line.startswith("DRIVER=")), "")
            vendor = _SOC_DRIVERS.get(driver.removesuffix("_dpu").removesuffix("-gpu"))
        if vendor is not None:
            yield Hardware(kind, vendor, f"/sys/class/{name}/{entry.name}")


def windows_hardware(adapters: list[dict[str, str]], kind: DeviceKind) -> list[Hardware]:
    """The hardware of entries of Windows's registry; adapters of software and of virtual machines are left out."""
    makers = _GPU_MAKERS if kind is DeviceKind.GPU else _NPU_MAKERS
    found = []
    for adapter in adapters:
        text = adapter["MatchingDeviceId"]
        match = _VENDOR.search(text)
        vendor = makers.get(int(match[1], 16)) if match else ("Qualcomm" if "qcom" in text.lower() else None)
        if vendor is not None:
            found.append(Hardware(kind, vendor, adapter["DriverDesc"]))
    return found
