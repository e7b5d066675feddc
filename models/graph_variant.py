"""Kinds of devices, and variants of a model's graph for devices that cannot run `model.onnx`, or run it slowly.

A variant computes what `model.onnx` does over the same weights (docs/graph-contract.md). A bundle lists those that were
written beside it; the runtime makes the GPU's on demand where a bundle has none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final

from .json_file import Count

VARIANT_CONTRACT: Final = 1
"""Version of the inputs and outputs of variants, and of what is known about them here (docs/graph-contract.md)."""
_FILE_NAME: Final = re.compile(r"model_(gpu|npu)[a-z0-9_]*\.onnx(\.data)?")


class DeviceKind(Enum):
    """The device that an execution provider computes on."""

    CPU = "cpu"
    GPU = "gpu"
    NPU = "npu"


class Precision(StrEnum):
    """Element type of a graph's activations and cache."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"


@dataclass(frozen=True)
class VariantFile:
    """A variant of the model's graph that lies beside it in the bundle."""

    device: DeviceKind
    file: str
    """Name of the .onnx file in the bundle's folder; its weights are in model.onnx.data as far as they agree."""
    precision: Precision
    width: Count | None = None
    """Number of new tokens of a pass, where shapes are static."""
    context: Count | None = None
    """Number of cache slots before the new tokens, where shapes are static."""
    providers: tuple[str, ...] = ()
    """Execution providers that it was written for; empty for all of the device's kind."""
    plain: bool = False
    """Whether it has no attention bias, and so serves passes of consecutive tokens only."""
    contract: Count = VARIANT_CONTRACT


def is_variant_file(name: str) -> bool:
    """Whether a file in a bundle is named like a variant's graph or its data."""
    return _FILE_NAME.fullmatch(name) is not None
