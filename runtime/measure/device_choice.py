"""On which device and with how many threads a model was measured to decode fastest on this machine."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from ...errors import DeviceError
from ...models.bundle import Bundle
from ...models.json_file import Count
from ...models.manifest import DeviceKind
from ..devices.processor import default_threads, usable_cores, usable_physical_cores
from ..devices.providers import Device, choose_device, cpu_device, device_identity
from ..graph.session import SessionConfig
from .measurement_store import MeasurementKey, MeasurementStore, model_key

_log: Final = logging.getLogger(__name__)


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


FASTEST_DEVICES: Final = MeasurementStore("fastest-device", 1, FastestDevice)
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


@dataclass(frozen=True)
class ThreadChoice:
    """The number of threads with which a model is fastest."""

    threads: Count
    seconds: Mapping[int, float]
    """Seconds of a pass of every measured width together, by number of threads."""
    busy: bool = False
    """Whether other programs used the processor meanwhile; the choice is then not stored."""


THREAD_CHOICES: Final = MeasurementStore("threads", 1, ThreadChoice)
"""Numbers of threads with which models are fastest on this machine."""


def chosen_threads(bundle: Bundle, config: SessionConfig) -> int:
    """The number of threads that was measured to be fastest; 0 for the default, or if nothing was measured."""
    if config.device.kind is not DeviceKind.CPU:
        return 0
    choice = THREAD_CHOICES.load(thread_choice_key(bundle, config))
    if choice is None or choice.threads > usable_cores() or choice.threads == default_threads():
        return 0
    return choice.threads


def thread_candidates() -> list[int]:
    """Numbers of threads worth measuring, the default first: all physical cores, and half of the default ones."""
    default = default_threads()
    others = {usable_physical_cores(), (default + 1) // 2} - {default}
    return [default, *sorted(others, reverse=True)]


def thread_choice_key(bundle: Bundle, config: SessionConfig) -> MeasurementKey:
    """The key of a model's number of threads on this machine."""
    return model_key(bundle, replace(config, threads=0, shares_cores=False), default_threads(), usable_cores())
