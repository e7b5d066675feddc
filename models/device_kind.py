"""What a model computes on: the kinds that decide which form of a model's weights suits best."""

from __future__ import annotations

from enum import Enum


class DeviceKind(Enum):
    """What an execution provider computes on."""

    CPU = "cpu"
    GPU = "gpu"
    NPU = "npu"
