"""The devices that can run a session: execution providers on pieces of hardware.

Devices come from ONNX Runtime's list (`get_ep_devices`), to which the plugins of installed packages add theirs. A
provider that is compiled in but lists no device is available by its name, if a session on it is not one on the CPU.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import onnxruntime as ort

from ...errors import DeviceError
from ...models.manifest import DeviceKind
from ..graph.ort import ORT_ERRORS, SILENT, load_session, session_options
from .chip import running_architecture
from .packages import PACKAGES, SUFFIX, missing_device, registered_plugins

CPU_PROVIDER: Final = f"CPU{SUFFIX}"
_KINDS: Final = {package.provider: package.kind for package in PACKAGES} | {
    "CPU": DeviceKind.CPU,
    "MIGraphX": DeviceKind.GPU,
    "VitisAI": DeviceKind.NPU,
}
"""Kind of device of the providers that run language models, by provider name without its suffix."""
_SIMULATING: Final = ("WebGpu", "QNN")
"""Providers whose device is simulated where it lies on the CPU: a Vulkan driver in software, Qualcomm's simulator."""
_MEMORY: Final = {"WebGpu": "webgpu", "CUDA": "cuda", "Dml": "dml"}
"""ONNX Runtime's names of memory on devices where a KV cache can lie, by provider."""
_DEFAULT_SEVERITY: Final = 2
"""Severity of ONNX Runtime's log from which on it prints: warnings."""
_SIMULATED_SOC: Final = {"soc_model": "60", "htp_arch": "73"}
"""The chip that Qualcomm's simulator stands for; on real hardware the plugin asks the driver."""
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
DeviceMemory: TypeAlias = tuple[str, int]
"""ONNX Runtime's name of a device's memory, such as `webgpu`, and the number of the device."""


@dataclass(frozen=True)
class Device:
    """One execution provider on one piece of hardware; two of one provider and index are equal."""

    provider: str
    """Name of the execution provider, which ends with `ExecutionProvider`."""
    kind: DeviceKind = field(compare=False)
    """The class of the device, which decides which graph it gets."""
    vendor: str = field(default="", compare=False)
    handle: Any = field(default=None, compare=False)
    """ONNX Runtime's `OrtEpDevice`; None for a provider known by its name only."""
    index: int = 0
    """Number among the devices of its provider."""
    simulated: bool = field(default=False, compare=False)
    """Whether software stands for the hardware: good for tests, never for speed."""

    def __str__(self) -> str:
        name = self.provider.removesuffix(SUFFIX)
        return f"{name}:{self.index}" if self.index else name

    @property
    def name(self) -> str:
        """The name that asks for this very device, such as `WebGpu:0`; `CPU` for the CPU."""
        return "CPU" if self.provider == CPU_PROVIDER else f"{self.provider.removesuffix(SUFFIX)}:{self.index}"

    @property
    def plugin_version(self) -> str:
        """Version of the provider; empty for one that is part of ONNX Runtime."""
        metadata = {} if self.handle is None else self.handle.ep_metadata
        packages = (plugin.version for plugin in registered_plugins() if plugin.provider == self.provider)
        return "" if self.provider == CPU_PROVIDER else next(packages, "") or str(metadata.get("version", ""))

    @property
    def provider_options(self) -> Mapping[str, str]:
        """Options of the provider for a session; ONNX Runtime ignores names that a provider does not know."""
        name = self.provider.removesuffix(SUFFIX)
        if name == "WebGpu":
            # Without it, the few nodes over positions and slots that compute with int64 run on the CPU.
            return {"enableInt64": "1"}
        if name == "QNN":
            backend = str(importlib.import_module("onnxruntime_qnn").get_qnn_htp_path())
            options = {"backend_path": backend, "enable_htp_fp16_precision": "1"}
            return {**options, **_SIMULATED_SOC} if self.simulated else options
        return {}

    @property
    def session_entries(self) -> Mapping[str, str]:
        """Configuration entries of a session on this device."""
        # An NPU gets graphs that it runs wholly; a graph of which it takes less is an error, and never a slow surprise.
        return {"session.disable_cpu_ep_fallback": "1"} if self.kind is DeviceKind.NPU else {}

    @property
    def memory(self) -> DeviceMemory | None:
        """Type and id of its memory for `OrtValue`s; None where the KV cache is NumPy's."""
        memory = _MEMORY.get(self.provider.removesuffix(SUFFIX))
        return None if memory is None else (memory, self.index)


def cpu_device() -> Device:
    """The CPU, without looking for other devices."""
    return Device(CPU_PROVIDER, DeviceKind.CPU)


def available_devices() -> list[Device]:
    """All devices that can run a session, in the order of `preferred_first`. Registers the installed plugins."""
    registered_plugins()
    devices: list[Device] = []
    for handle in ort.get_ep_devices():
        device = _described(handle, sum(other.provider == handle.ep_name for other in devices))
        if device is not None:
            devices.append(device)
    listed = {device.provider for device in devices}
    named = [provider for provider in _compiled_in() if provider not in listed and _works(provider)]
    devices += [Device(provider, _KINDS[provider.removesuffix(SUFFIX)]) for provider in named]
    return preferred_first(devices)


def preferred_first(devices: Iterable[Device]) -> list[Device]:
    """Sort devices: the CPU, then those that `gpu` and `npu` should mean, simulated ones last."""

    def rank(device: Device) -> tuple[bool, bool, bool]:
        # WebGPU runs on every GPU, so a provider made for one make of them has the faster kernels.
        general = device.provider.removesuffix(SUFFIX) == "WebGpu"
        return device.kind is not DeviceKind.CPU, device.simulated, general

    return sorted(devices, key=rank)


def unusable_providers() -> list[str]:
    """Providers that are part of ONNX Runtime here, but would run on the CPU: the libraries they need are missing."""
    listed = {handle.ep_name for handle in ort.get_ep_devices()}
    return [provider for provider in _compiled_in() if provider not in listed and not _works(provider)]


def _compiled_in() -> list[str]:
    """Providers of language models that are part of ONNX Runtime.

    A plugin without a device is among the available providers too; asking for it by name would run on the CPU.
    """
    plugins = {plugin.provider for plugin in registered_plugins()}
    names = ort.get_available_providers()
    if f"CUDA{SUFFIX}" in names:
        _load_cuda()
    return [name for name in names if name.removesuffix(SUFFIX) in _KINDS and name not in plugins]


@cache
def _load_cuda() -> None:
    """Load CUDA and cuDNN from the Python packages that bring them, where the system's loader does not look."""
    # What is missing is printed; that the provider does not work says it too.
    with redirect_stdout(io.StringIO()):
        ort.preload_dlls()


@cache
def _works(provider: str) -> bool:
    """Whether a session that asks for a provider by its name gets it: without its libraries it gets the CPU."""
    from ...models.onnx_file.model_messages import GraphProto, model, node, value_info  # noqa: PLC0415 -- protobuf

    values = [value_info(name, np.float32, [1]) for name in ("x", "y")]
    graph = GraphProto(name="works", node=[node("Neg", ["x"], ["y"])], input=values[:1], output=values[1:])
    # Missing libraries are reported to ONNX Runtime's own log, as several lines on standard error. Its level cannot be
    # asked for, so the default is set again.
    ort.set_default_logger_severity(SILENT)
    try:
        names = (provider, CPU_PROVIDER)
        session = load_session(model(graph, opset=21).SerializeToString(), session_options(1), names)
    except ORT_ERRORS:
        return False
    finally:
        ort.set_default_logger_severity(_DEFAULT_SEVERITY)
    return bool(session.get_providers()[0] == provider)


def _described(handle: Any, index: int) -> Device | None:
    """The device of one of ONNX Runtime's handles; None for one that runs no language model."""
    provider, name = handle.ep_name, handle.ep_name.removesuffix(SUFFIX)
    hardware = DeviceKind[handle.device.type.name]
    kind = hardware if hardware is not DeviceKind.CPU else _KINDS.get(name)
    if kind is None:
        return None
    if name == "QNN" and hardware is not DeviceKind.NPU and running_architecture().lower() in ("arm64", "aarch64"):
        # Beside the NPU of a real chip, the plugin lists a reference implementation on the CPU, and the GPU.
        return None
    simulated = hardware is DeviceKind.CPU and name in _SIMULATING
    vendor = "" if simulated else str(handle.device.vendor or handle.ep_vendor)
    return Device(provider, kind, vendor, handle, index, simulated)


def choose_device(request: str) -> Device:
    """Find a device by what a user asks for.

    Args:
        request: `auto` (here the CPU; `runtime.measure.device_choice` knows what was measured to be faster), `cpu`,
            `gpu`, `npu`, or the name of a provider with or without its suffix; each may have an index, as in
            `webgpu:1`. Only names other than `auto` and `cpu` register plugins.

    Raises:
        DeviceError: this machine has no such device; the hint says what is missing, or lists the available ones.
    """
    name, colon, number = request.lower().partition(":")
    wanted = name.removesuffix(SUFFIX.lower())
    if colon and not (number.isdecimal() and number.isascii() and len(number) < 5):
        raise DeviceError(f"device is {request!r:.60}", "the part after the colon must be a number, as in webgpu:0")
    index = int(number) if colon else 0
    if wanted in ("auto", "cpu"):
        if index:
            raise DeviceError(f"this machine has no device {request!r:.60}", "the CPU is one device: cpu")
        return cpu_device()
    devices = available_devices()
    by_name = [device for device in devices if device.provider.removesuffix(SUFFIX).lower() == wanted]
    found = by_name or [device for device in devices if device.kind.value == wanted]
    if index < len(found):
        return found[index]
    if found:
        names = ", ".join(device.name for device in found)
        raise DeviceError(f"this machine has no device {request!r:.60}", f"it has {names}; see edge-run devices")
    available = ", ".join(dict.fromkeys(map(str, devices)))
    hint = (
        missing_device(wanted, registered_plugins(), unusable_providers())
        or f"available: {available}; see edge-run devices"
    )
    raise DeviceError(f"this machine has no device {request!r:.60}", hint)


def add_device(options: ort.SessionOptions, device: Device) -> list[str]:
    """Add `device` to session options; returns the provider names with which to create the session."""
    for name, value in device.session_entries.items():
        options.add_session_config_entry(name, value)
    if device.provider == CPU_PROVIDER:
        return [device.provider]
    if device.handle is None:
        # Naming the CPU would contradict `session_entries`, which allow no node there.
        return [device.provider] if device.kind is DeviceKind.NPU else [device.provider, CPU_PROVIDER]
    options.add_provider_for_devices([device.handle], dict(device.provider_options))
    return []


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


class DeviceLock:
    """A context in which the calling thread may use a device; one thread may enter it several times.

    All WebGPU sessions of a process share one queue and one pool of buffers, which have no lock: two sessions that run
    in two threads, or one that frees memory while the other runs, end the process. So whatever touches such a device
    holds its lock: loading, binding (which copies to the device), running, and freeing. Sessions on other devices go on
    meanwhile.
    """

    def __init__(self) -> None:
        self._lock: Final = threading.RLock()
        self._unused: Final[list[Any]] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        self._unused.clear()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def free(self, values: list[Any]) -> None:
        """Empty a list of values of the device: they are freed now, or when the device is used next.

        It never waits: the garbage collector calls it in any thread, whatever locks that thread holds.
        """
        self._unused.extend(values)
        values.clear()
        if self._lock.acquire(blocking=False):
            try:
                self._unused.clear()
            finally:
                self._lock.release()


_locks: Final[dict[DeviceMemory, DeviceLock]] = {}
_registry: Final = threading.Lock()


def device_lock(memory: DeviceMemory | None) -> DeviceLock:
    """The lock of a device by its memory, None for the CPU's: one for all who use a WebGPU device, else a new one."""
    if memory is None or memory[0] != "webgpu":
        return DeviceLock()
    with _registry:
        return _locks.setdefault(memory, DeviceLock())
