"""Loads graphs on devices other than the CPU, and finds out what each node runs on.

ONNX Runtime gives the CPU whatever a provider does not take, all of a graph too, without a word: a provider asked for
by name may turn out to be the CPU. So it records which provider took each node, and a device that took none is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from ...errors import DeviceError
from ..devices.packages import package_of
from ..devices.providers import CPU_PROVIDER, Device, add_device, device_lock
from .ort import ORT_ERRORS, error_reason, load_session

_FILE_ERRORS: Final = (ort_errors.NoSuchFile, ort_errors.InvalidProtobuf, ort_errors.InvalidGraph, ort_errors.NoModel)
"""Errors of the file, whatever the device."""
_WITHOUT_WEIGHTS: Final = frozenset(
    {
        *("Cast", "Concat", "Constant", "ConstantOfShape", "Expand", "Gather", "Range", "Reshape", "Shape", "Slice"),
        *("Squeeze", "Unsqueeze", "Add", "Sub", "Mul", "Div", "Min", "Max", "Mod", "Neg", "Equal", "Greater", "Less"),
        *("GreaterOrEqual", "LessOrEqual", "Not", "And", "Or", "Where", "Trilu", "ReduceSum", "ReduceMax", "CumSum"),
    }
)
"""Operators that a provider may leave to the CPU where they compute shapes, positions and masks."""
_RUN_ON_CPU: Final = "run the model on the CPU: --device cpu"


def runs_whole(on_cpu: Mapping[str, int]) -> bool:
    """Whether a device runs all nodes that work on weights or the cache, given what it left to the CPU."""
    return _WITHOUT_WEIGHTS.issuperset(on_cpu)


def on_cpu_text(on_cpu: Mapping[str, int]) -> str:
    """What stayed on the CPU, such as `2 Cast, 1 Range`; empty for nothing."""
    return ", ".join(f"{count} {operator}" for operator, count in sorted(on_cpu.items()))


def load_on_device(
    model: str | bytes, options: ort.SessionOptions, device: Device, where: Path
) -> tuple[ort.InferenceSession, dict[str, int]]:
    """Load a model on a device that may not be the CPU.

    Args:
        model: path of the model file, or the serialized model.
        options: session options; the device is added to them.
        device: where it runs.
        where: the file that errors name.

    Returns:
        The session, and the number of nodes that the device left to the CPU, by operator. Nothing is recorded on the
        CPU, which runs them all.

    Raises:
        DeviceError: the device is not usable, or took nothing.
        Exception: one of `ORT_ERRORS` about the file.
    """
    if device.provider == CPU_PROVIDER:
        return load_session(model, options, add_device(options, device)), {}
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    try:
        with device_lock(device.memory):
            session = load_session(model, options, add_device(options, device))
    except _FILE_ERRORS:
        raise
    except ORT_ERRORS as error:
        raise device_failure(error, device, where) from error
    if session.get_providers()[0] != device.provider:
        package = package_of(device.provider)
        reason = "its libraries were not found" if package is None else package.without_device
        raise DeviceError(f"{device} is not usable here, ONNX Runtime would run on the CPU instead", reason)
    parts = session.get_provider_graph_assignment_info()
    nodes = [(part.ep_name, node.op_type) for part in parts for node in part.get_nodes()]
    if all(provider != device.provider for provider, _ in nodes):
        raise DeviceError(f"{device} runs none of the {len(nodes)} nodes of {where}", _RUN_ON_CPU)
    return session, dict(Counter(operator for provider, operator in nodes if provider == CPU_PROVIDER))


def device_failure(error: Exception, device: Device, where: Path) -> DeviceError:
    """Say in one line why a device cannot load or run a model."""
    no_adapter, driver = "cannot start: the Vulkan driver offers no usable adapter", "update the driver of the GPU"
    no_floats = f"cannot run {where}: its adapter has no 16-bit floats (f16)"
    known = {
        "No supported adapters": (no_adapter, driver),
        "Failed to get a WebGPU adapter": (no_adapter, driver),
        "requires f16": (no_floats, "use a model with 32-bit activations"),
        "fallback to CPU EP has been explicitly disabled": (
            f"cannot run all of {where}",
            "export the model for it with edge-run export",
        ),
    }
    what, hint = next((said for text, said in known.items() if text in str(error)), ("", ""))
    if what:
        return DeviceError(f"{device} {what}", f"{hint}, or {_RUN_ON_CPU}")
    return DeviceError(f"{device} cannot run {where}: {error_reason(error)}", _RUN_ON_CPU)
