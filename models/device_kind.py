"""Kinds of devices, which decide which variant of a model suits best."""

from __future__ import annotations

from enum import Enum


class DeviceKind(Enum):
    """The device that an execution provider computes on."""

    CPU = "cpu"
    GPU = "gpu"
    NPU = "npu"
