"""Lists this machine's execution providers and adds one to session options.

Devices come from ONNX Runtime's list (`get_ep_devices`), which includes those of plugin providers. A provider that is
compiled in but lists no device is available by its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnxruntime as ort

from ...errors import DeviceError
from ...models.device_kind import DeviceKind

_SUFFIX = "ExecutionProvider"

_COMPILED_IN = {
    "CPU": DeviceKind.CPU,
    "CUDA": DeviceKind.GPU,
    "Dml": DeviceKind.GPU,
    "WebGpu": DeviceKind.GPU,
    "MIGraphX": DeviceKind.GPU,
    "NvTensorRTRTX": DeviceKind.GPU,
    "Tensorrt": DeviceKind.GPU,
    "CoreML": DeviceKind.NPU,
    "OpenVINO": DeviceKind.NPU,
    "QNN": DeviceKind.NPU,
    "VitisAI": DeviceKind.NPU,
}
"""Kind of device of the providers that run language models, by provider name without its suffix."""


@dataclass(frozen=True)
class Device:
    """One execution provider on one piece of hardware."""

    provider: str
    kind: DeviceKind
    vendor: str
    handle: Any = None
    """ONNX Runtime's `OrtEpDevice`; None for a provider known by its name only."""

    def __str__(self) -> str:
        return self.provider.removesuffix(_SUFFIX)


def available_devices() -> list[Device]:
    """All devices that can run a session, the CPU first."""
    devices = [
        Device(d.ep_name, DeviceKind[d.device.type.name], d.device.vendor or d.ep_vendor, d)
        for d in ort.get_ep_devices()
    ]
    listed = {device.provider for device in devices}
    for provider in ort.get_available_providers():
        kind = _COMPILED_IN.get(provider.removesuffix(_SUFFIX))
        if kind is not None and provider not in listed:
            devices.append(Device(provider, kind, ""))
    return sorted(devices, key=lambda device: device.kind is not DeviceKind.CPU)


def choose_device(request: str) -> Device:
    """Find a device by `auto` (the CPU), `cpu`, `gpu`, `npu`, or a provider's name with or without its suffix.

    Raises:
        DeviceError: this machine has no such device; the hint lists the available ones.
    """
    devices = available_devices()
    wanted = "cpu" if request.lower() == "auto" else request.lower().removesuffix(_SUFFIX.lower())
    for device in devices:
        if wanted in (device.kind.value, str(device).lower()):
            return device
    names = ", ".join(sorted({str(device) for device in devices}))
    raise DeviceError(f"this machine has no device {request!r}", f"available: {names}; see edge-run devices")


def add_device(options: ort.SessionOptions, device: Device) -> list[str]:
    """Add `device` to session options; returns the provider names with which to create the session."""
    if device.kind is DeviceKind.CPU:
        return [device.provider]
    if device.handle is None:
        return [device.provider, f"CPU{_SUFFIX}"]
    options.add_provider_for_devices([device.handle], {})
    return []
