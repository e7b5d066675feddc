"""Which execution providers this machine has, and how a session is put on one.

ONNX Runtime's device list (`get_ep_devices`, which plugin providers join) comes first; a provider that is only
compiled in and lists no device is offered by name.
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
"""Providers that run language models, by the name without its suffix."""


@dataclass(frozen=True)
class Device:
    """One execution provider on one piece of hardware."""

    provider: str
    kind: DeviceKind
    vendor: str
    handle: Any = None
    """ONNX Runtime's `OrtEpDevice`, or None for a provider known by name only."""

    def __str__(self) -> str:
        return self.provider.removesuffix(_SUFFIX)


def available_devices() -> list[Device]:
    """Every device a session can be put on, the CPU first."""
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
    """The device meant by `auto` (the CPU), `cpu`, `gpu`, `npu`, or a provider's name with or without its suffix.

    Raises:
        DeviceError: this machine has no such device; names those it has.
    """
    devices = available_devices()
    wanted = "cpu" if request.lower() == "auto" else request.lower().removesuffix(_SUFFIX.lower())
    for device in devices:
        if wanted in (device.kind.value, str(device).lower()):
            return device
    names = ", ".join(sorted({str(device) for device in devices}))
    raise DeviceError(f"no device {request!r} here", f"available: {names}; see edge-run devices")


def put_on(options: ort.SessionOptions, device: Device) -> list[str]:
    """Add `device` to the session options; returns the provider names to pass beside them."""
    if device.kind is DeviceKind.CPU:
        return [device.provider]
    if device.handle is None:
        return [device.provider, f"CPU{_SUFFIX}"]
    options.add_provider_for_devices([device.handle], {})
    return []
