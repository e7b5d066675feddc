"""Names that options of an export take, and the presets: named settings of several options."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final


class PresetChoice(StrEnum):
    """Names of presets."""

    BEST = "best"
    BALANCED = "balanced"
    FAST = "fast"
    SMALL = "small"


PRESETS: Final[Mapping[PresetChoice, Mapping[str, Any]]] = {
    PresetChoice.BEST: {"weights": "mixed", "budget": "6bpw", "zero_points": True, "half_scales": True},
    PresetChoice.BALANCED: {"weights": "int4", "block": 128, "head": "int8", "half_scales": True, "method": "gptq"},
    PresetChoice.FAST: {"weights": "int4", "block": 128, "half_scales": True, "method": "gptq"},
    PresetChoice.SMALL: {"weights": "mixed", "budget": "4.3bpw@file", "zero_points": True, "half_scales": True},
}
"""Options of each preset by their names; docs/log.md has the KL, bytes and times of each."""


class WeightChoice(StrEnum):
    """Names of weight formats, which have the recipe's blocks."""

    FP32 = "fp32"
    INT8 = "int8"
    INT4 = "int4"
    INT2 = "int2"
    MIXED = "mixed"


class VisionChoice(StrEnum):
    """Formats of the weights of vision towers, and none for an export without."""

    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"
    NONE = "none"


class MethodChoice(StrEnum):
    """Quantization methods, with AWQ scaling before them or without."""

    RTN = "rtn"
    K_QUANT = "k-quant"
    GPTQ = "gptq"
    YAQA = "yaqa"  # GPTQ with gradients
    LEARNED = "learned"  # begins with yaqa's codes
    AWQ = "awq"
    AWQ_K_QUANT = "awq+k-quant"
    AWQ_GPTQ = "awq+gptq"
    AWQ_YAQA = "awq+yaqa"
    AWQ_LEARNED = "awq+learned"


class ActivationsChoice(StrEnum):
    """Types of the inputs and outputs of linears in graphs for NPUs, besides float16."""

    INT16 = "int16"
    INT8 = "int8"


class DeviceChoice(StrEnum):
    """Kinds of device that graphs are written for besides the CPU."""

    GPU = "gpu"
    NPU = "npu"
