"""The packages that bring execution providers, and what each of them needs of the machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...models.graph_variant import DeviceKind
from .plugins import SUFFIX, Plugin

_NO_GPU: Final = (
    "no Vulkan GPU driver was found; install the driver of your GPU"
    if sys.platform == "linux"
    else "no GPU was found; install the driver of your GPU"
)


@dataclass(frozen=True)
class ProviderPackage:
    """How a provider gets onto a machine."""

    provider: str
    """Name without its suffix."""
    kind: DeviceKind
    install: str
    """The command that installs it; empty where it is part of ONNX Runtime for one system."""
    without_device: str
    """What to say where it is installed and finds no device."""


PACKAGES: Final = (
    ProviderPackage("WebGpu", DeviceKind.GPU, "pip install 'edge-run[webgpu]'", _NO_GPU),
    ProviderPackage(
        "CUDA",
        DeviceKind.GPU,
        "pip install 'onnxruntime-gpu[cuda,cudnn]'",
        "CUDA 13 and cuDNN 9 were not found; pip install 'onnxruntime-gpu[cuda,cudnn]'",
    ),
    ProviderPackage(
        "NvTensorRTRTX",
        DeviceKind.GPU,
        "pip install onnxruntime-ep-nv-tensorrt-rtx-cu13",
        "onnxruntime-ep-nv-tensorrt-rtx needs an NVIDIA RTX GPU and its driver",
    ),
    ProviderPackage("Dml", DeviceKind.GPU, "pip install onnxruntime-directml", "DirectML needs a GPU and Windows"),
    ProviderPackage("QNN", DeviceKind.NPU, "pip install 'edge-run[qnn]'", "onnxruntime-qnn needs a Snapdragon NPU"),
    ProviderPackage(
        "OpenVINO",
        DeviceKind.NPU,
        "pip install onnxruntime-ep-openvino",
        "onnxruntime-ep-openvino needs Intel hardware: it found none",
    ),
    ProviderPackage("CoreML", DeviceKind.NPU, "", "CoreML needs a Mac"),
)


def package_of(provider: str) -> ProviderPackage | None:
    """How a provider is installed, by its name with or without its suffix, in any case of letters."""
    name = provider.lower().removesuffix(SUFFIX.lower())
    return next((package for package in PACKAGES if package.provider.lower() == name), None)


def missing_device(wanted: str, plugins: Sequence[Plugin], unusable: Sequence[str] = ()) -> str:
    """What to do where a device was asked for that no provider lists; empty for a name that means nothing.

    Args:
        wanted: `gpu`, `npu`, or the name of a provider without its suffix, in small letters.
        plugins: the installed plugins.
        unusable: providers that are part of ONNX Runtime, and do not find what they need.
    """
    candidates = [package for package in PACKAGES if wanted in (package.kind.value, package.provider.lower())]
    if not candidates:
        return ""
    installed = {plugin.provider.removesuffix(SUFFIX).lower(): plugin for plugin in plugins}
    for package in candidates:
        plugin = installed.get(package.provider.lower())
        if plugin is not None:
            return f"{plugin.module} cannot be loaded: {plugin.error}" if plugin.error else package.without_device
        if package.provider + SUFFIX in unusable:
            return package.without_device
    broken = next((plugin for plugin in plugins if plugin.error and not plugin.provider), None)
    if broken is not None:
        return f"{broken.module} cannot be loaded: {broken.error}"
    if len(candidates) > 1:
        return f"no installed package finds a {wanted.upper()} here; edge-run devices says which package to install"
    (package,) = candidates
    return f"install its package: {package.install}" if package.install else package.without_device
