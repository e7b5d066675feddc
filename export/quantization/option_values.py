"""Names that options of an export take, and the presets: named settings of several options."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

PresetChoice = StrEnum("PresetChoice", ["BEST", "BALANCED", "FAST", "SMALL"])
"""Names of presets."""
PRESETS: Final[Mapping[PresetChoice, Mapping[str, Any]]] = {
    PresetChoice.BEST: {"weights": "mixed", "budget": "6bpw", "zero_points": True, "half_scales": True},
    PresetChoice.BALANCED: {"weights": "int4", "block": 128, "head": "int8", "half_scales": True, "method": "gptq"},
    PresetChoice.FAST: {"weights": "int4", "block": 128, "half_scales": True, "method": "gptq"},
    PresetChoice.SMALL: {"weights": "mixed", "budget": "4.3bpw@file", "zero_points": True, "half_scales": True},
}
"""Options of each preset by their names; docs/log.md has the KL, bytes and times of each."""


WeightChoice = StrEnum("WeightChoice", ["FP32", "INT8", "INT4", "INT2", "MIXED"])
"""Names of weight formats, which have the recipe's blocks."""
VisionChoice = StrEnum("VisionChoice", ["FP32", "FP16", "INT8", "NONE"])
"""Formats of the weights of vision towers, and none for an export without."""
ActivationsChoice = StrEnum("ActivationsChoice", ["INT16", "INT8"])
"""Types of the inputs and outputs of linears in graphs for NPUs, besides float16."""
DeviceChoice = StrEnum("DeviceChoice", ["GPU", "NPU"])
"""Kinds of device that graphs are written for besides the CPU."""


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
