"""The packages that bring execution providers, what each needs of the machine, and the registration of plugins.

ONNX Runtime loads a plugin, a provider in a package of its own, when it is registered under a name, which is possible
once in a process and lasts until it ends: a session may outlive whoever registered the plugin, so nothing is ever
unregistered. The packages have no entry points; their modules are known by name.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

import onnxruntime as ort

from ...models.manifest import DeviceKind
from ..graph.ort import ORT_ERRORS, error_reason

_NO_GPU: Final = (
    "no Vulkan GPU driver was found; install the driver of your GPU"
    if sys.platform == "linux"
    else "no GPU was found; install the driver of your GPU"
)
SUFFIX: Final = "ExecutionProvider"
"""End of the names of all execution providers."""
_MODULES: Final = (
    "onnxruntime_ep_webgpu",
    "onnxruntime_qnn",
    "onnxruntime_ep_openvino",
    "onnxruntime_ep_nv_tensorrt_rtx",
    "onnxruntime_ep_nv_tensorrt_rtx_cu12",
    "onnxruntime_ep_nv_tensorrt_rtx_cu13",
)
"""Modules of plugins, each with a function `get_library_path`."""
_PLUGIN_ERRORS: Final[tuple[type[Exception], ...]] = (*ORT_ERRORS, ImportError, OSError, AttributeError)
"""What a package that is damaged or made for another system raises; it must not keep others from being found."""
_LOCK: Final = threading.Lock()


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
    for broken in plugins:
        if broken.error and not broken.provider:
            return f"{broken.module} cannot be loaded: {broken.error}"
    if len(candidates) > 1:
        return f"no installed package finds a {wanted.upper()} here; edge-run devices says which package to install"
    (package,) = candidates
    return f"install its package: {package.install}" if package.install else package.without_device


_found: list[tuple[Plugin, ...]] = []
"""The plugins, once they are registered."""


@dataclass(frozen=True)
class Plugin:
    """An execution provider of an installed package."""

    provider: str
    """Its name, which ends with `ExecutionProvider`."""
    module: str
    """The Python module it comes with; empty for those that Windows brings."""
    version: str
    """Version of the package; empty if nothing says it."""
    error: str = ""
    """Why it cannot be used; empty if it was registered."""


def registered_plugins() -> tuple[Plugin, ...]:
    """Register the plugins of all installed packages, once in this process, and return them.

    A plugin that the program has registered itself is left as it is: one library under two names would list every
    device twice.
    """
    with _LOCK:
        if not _found:
            # Before any registration: what is listed now was registered by the program that embeds edge-run.
            known = {device.ep_name for device in ort.get_ep_devices()}
            _found.append((*_of_modules(known), *_of_windows(known)))
        return _found[0]


def _of_modules(known: set[str]) -> Iterator[Plugin]:
    """Register what installed Python packages bring."""
    for name in _MODULES:
        try:
            if find_spec(name) is None:
                continue
            module = importlib.import_module(name)
            library = str(module.get_library_path())
            names = module.get_ep_names() if hasattr(module, "get_ep_names") else [module.get_ep_name()]
        except _PLUGIN_ERRORS as error:
            yield Plugin("", name, _version(name), error_reason(error))
            continue
        for provider in map(str, names):
            yield Plugin(provider, name, _version(name), _register(provider, library, known))


def _of_windows(known: set[str]) -> Iterator[Plugin]:
    """Register the plugins of Windows's own catalog that are present already; nothing is downloaded."""
    if find_spec("windowsml") is None:
        return
    try:
        windowsml = importlib.import_module("windowsml")
        with windowsml.EpCatalog() as catalog:
            for found in catalog.find_all_providers():
                if found.ready_state.name.replace("_", "").lower() != "notpresent":
                    found.ensure_ready()
                    failure = _register(found.name, str(found.library_path), known)
                    yield Plugin(found.name, "", str(found.version), failure)
    except _PLUGIN_ERRORS as error:
        yield Plugin("", "windowsml", _version("windowsml"), error_reason(error))


def _register(provider: str, library: str, known: set[str]) -> str:
    """Register a library; returns why it failed, or nothing."""
    if provider in known:
        return ""
    try:
        ort.register_execution_provider_library(provider, library)
    except ORT_ERRORS as error:
        return "" if "already registered" in str(error) else error_reason(error)
    return ""


def _version(module: str) -> str:
    """Version of the package of a module, which is called like the module."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 -- importing it takes 10 ms

    try:
        return version(module.replace("_", "-"))
    except PackageNotFoundError:
        return ""
