"""Measures on which device and with how many threads a model decodes fastest on this machine, and remembers it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from ...errors import DeviceError, EdgeError
from ...models.bundle import Bundle
from ...models.graph_variant import DeviceKind
from ...models.json_file import Count
from ...models.progress import Progress, silent
from ..devices.processor import default_threads, usable_cores, usable_physical_cores
from ..devices.providers import Device, available_devices, choose_device, cpu_device, device_identity
from ..graph.bound_graph import BoundGraph
from ..graph.open_graph import open_graph
from ..graph.session import SessionConfig
from .bundle_timing import bind_filled, compare_pair
from .measurement_store import MeasurementKey, MeasurementStore, model_key
from .system_load import LoadMeter

_log: Final = logging.getLogger(__name__)

_WORTH: Final = 0.95
"""A device replaces the CPU, and a number of threads the default one, if passes take at most this share of its time."""
_WIDTHS: Final = (1, 4)
"""Pass widths whose times are added up: a token of plain decoding, and a draft that is verified."""


@dataclass(frozen=True)
class FastestDevice:
    """The device on which a model decodes fastest."""

    device: str
    """The name that asks for it, such as `WebGpu:0`; `CPU`."""
    seconds: Mapping[str, float]
    """Seconds of a pass of one token by name of the device."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why other devices were not timed, by their names."""
    identity: tuple[str, ...] = ()
    """Driver, plugin and hardware of the chosen device; the measurement is void where they change."""
    busy: bool = False
    """Whether other programs used the processor meanwhile; a choice against the CPU is then not stored."""


FASTEST_DEVICES: Final = MeasurementStore.of_records("fastest-device", 1, FastestDevice)
"""Devices on which models decode fastest on this machine."""


def fastest_device_key(bundle: Bundle) -> MeasurementKey:
    """The key of a model's choice on this machine."""
    return model_key(bundle, SessionConfig(cpu_device()))


def measured_device(bundle: Bundle) -> Device:
    """What `--device auto` means for a model: the device that was measured to be fastest, the CPU until then.

    A device that has gone, or has another driver since, is replaced by the CPU with a warning. Without a measurement in
    favour of another device, no plugin is registered.
    """
    choice = FASTEST_DEVICES.load(fastest_device_key(bundle))
    cpu = cpu_device()
    if choice is None or choice.device == cpu.name:
        return cpu
    try:
        device = choose_device(choice.device)
        if device_identity(device) == choice.identity:
            return device
        problem = "it has another driver or plugin since; the CPU computes until edge-run tune measures again"
    except DeviceError as error:
        problem = f"{error.what}; the CPU computes"
    _log.warning("%s was fastest for %s, but %s", choice.device, bundle.folder.name, problem)
    return cpu


def measure_fastest_device(bundle: Bundle, config: SessionConfig, progress: Progress = silent) -> FastestDevice:
    """Measure on which device a model decodes fastest, and store it.

    Every device that computes the whole graph, and computes it right, decodes in turns with the CPU.

    Args:
        bundle: the model.
        config: how its graph is run on the CPU.
        progress: receives the stage and the fraction done, 0 to 1.

    Raises:
        BundleError: the model is damaged, or edge-run cannot decode with it.
        ContextError: the model's context is too short for a pass.
        EdgeError: ONNX Runtime failed on the CPU.
    """
    # A simulator of an NPU is never faster than the CPU that it runs on.
    others = [
        device
        for device in available_devices()
        if device.kind is DeviceKind.GPU or (device.kind is DeviceKind.NPU and not device.simulated)
    ]
    cpu = config.device
    if not others:
        return FastestDevice(cpu.name, {})
    best, best_seconds = cpu, float("inf")
    seconds: dict[str, float] = {}
    refused: dict[str, str] = {}
    busy = False
    on_cpu = _open(bundle, config)
    for number, device in enumerate(others):
        progress("comparing devices", number / len(others))
        try:
            on_device = _open(bundle, replace(config, device=device, threads=0))
        except EdgeError as error:
            refused[device.name] = error.what
            continue
        meter = LoadMeter(config.threads)
        times = compare_pair((on_cpu, on_device), (1,))
        busy = busy or meter.is_busy
        seconds[cpu.name] = min(times[0], seconds.get(cpu.name, times[0]))
        seconds[device.name] = times[1]
        if times[1] < min(_WORTH * times[0], best_seconds):
            best, best_seconds = device, times[1]
    progress("comparing devices", 1.0)
    identity = () if best is cpu else device_identity(best)
    choice = FastestDevice(best.name, seconds, refused, identity, busy and best is not cpu)
    if not choice.busy:
        FASTEST_DEVICES.save(fastest_device_key(bundle), choice)
    return choice


def _open(bundle: Bundle, config: SessionConfig) -> BoundGraph:
    """Load the graph on a device and bind it.

    Raises:
        EdgeError: the device cannot run it, runs it wrongly, or runs a part of it only.
    """
    graph = open_graph(bundle, config, cache=True)
    if not graph.assignments.whole:
        raise DeviceError(f"it leaves a part of the graph to the CPU: {graph.assignments.on_cpu_text()}")
    bound = bind_filled(graph, bundle)
    # As plain decoding of greedy text does.
    bound.whole_logits = False
    return bound


@dataclass(frozen=True)
class ThreadChoice:
    """The number of threads with which a model is fastest."""

    threads: Count
    seconds: Mapping[int, float]
    """Seconds of a pass of every measured width together, by number of threads."""
    busy: bool = False
    """Whether other programs used the processor meanwhile; the choice is then not stored."""


THREAD_CHOICES: Final = MeasurementStore.of_records("threads", 1, ThreadChoice)
"""Numbers of threads with which models are fastest on this machine."""


def chosen_threads(bundle: Bundle, config: SessionConfig) -> int:
    """The number of threads that was measured to be fastest; 0 for the default, or if nothing was measured."""
    if config.device.kind is not DeviceKind.CPU:
        return 0
    choice = THREAD_CHOICES.load(_key(bundle, config))
    if choice is None or choice.threads > usable_cores() or choice.threads == default_threads():
        return 0
    return choice.threads


def thread_candidates() -> list[int]:
    """Numbers of threads worth measuring, the default first: all physical cores, and half of the default ones."""
    default = default_threads()
    others = {usable_physical_cores(), (default + 1) // 2} - {default}
    return [default, *sorted(others, reverse=True)]


def choose_threads(bundle: Bundle, config: SessionConfig, progress: Progress = silent) -> ThreadChoice:
    """Measure which number of threads is fastest, and store it unless other programs disturbed the measurement.

    Two numbers at a time take turns, so that at most two sessions are in memory.

    Args:
        bundle: the model.
        config: how its graph is run, apart from the number of threads.
        progress: receives the stage and the fraction done, 0 to 1.

    Raises:
        BundleError: the model is damaged, or edge-run cannot decode with it.
        ContextError: the model's context is too short for a pass.
        EdgeError: ONNX Runtime failed.
    """
    default, *others = thread_candidates()
    best, busy = default, False
    seconds: dict[int, float] = {}
    for number, count in enumerate(others):
        progress("comparing numbers of threads", number / len(others))
        meter = LoadMeter(max(best, count))
        pair = (best, count)
        times = compare_pair([_open(bundle, replace(config, threads=each)) for each in pair], _WIDTHS)
        seconds.update(zip(pair, times, strict=True))
        busy = busy or meter.is_busy
        if times[1] < _WORTH * times[0]:
            best = count
    progress("comparing numbers of threads", 1.0)
    choice = ThreadChoice(best, seconds, busy)
    if seconds and not busy:
        THREAD_CHOICES.save(_key(bundle, config), choice)
    return choice


def _key(bundle: Bundle, config: SessionConfig) -> MeasurementKey:
    key = model_key(bundle, replace(config, threads=0, shares_cores=False))
    return replace(key, parts=(*key.parts, default_threads(), usable_cores()))
