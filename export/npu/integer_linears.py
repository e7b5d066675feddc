"""Linears with integer inputs, weights and outputs, for the integer units of NPUs.

Inputs and outputs have one scale and zero point a tensor, weights one scale an output and no zero point. Operators in
float16 between such linears take and return rounded values (`QuantizeLinear`, `DequantizeLinear`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...models.manifest import WeightFormat
from ..checkpoint.layer_weights import FusedLinear
from ..checkpoint.source import Float32Array, ModelSource, QuantizedRows
from ..quantization.codes import InputStatistics, StatisticsOf, half_precision, in_blocks, rounded_rows, unpack_codes
from ..quantization.gptq import gptq_rows

HEAD_BITS: Final = 16
"""Bits of inputs and outputs of the LM head: logits differ by less than 8 bits can tell."""
_SHRINKS: Final = {4: tuple(1 - step / 20 for step in range(10)), 8: (1.0,)}
"""Candidates of a scale by bits, relative to the one that reaches the largest weight."""
_LEAST_SCALE: Final = 1e-6
"""Smallest scale: one that float16 has, if with few digits."""


@dataclass(frozen=True)
class IntegerLinears:
    """How the linears of a model are computed in integers."""

    bits: int
    """Bits of inputs and outputs, 8 or 16."""
    source: ModelSource
    """The weights, norms and biases, SmoothQuant's factors applied; like the other fields."""
    statistics: StatisticsOf
    """Statistics of the linears' inputs."""
    ranges: Mapping[str, Float32Array]
    """Smallest and largest values of channels, 0 included, float32 [2, channels]: of inputs by the name of the linear,
    of outputs without the bias by the name of the matrix."""

    def matrix(self, linear: FusedLinear, name: str, bits: int) -> tuple[npt.NDArray[np.int8], Float32Array]:
        """Quantize a matrix of a linear by GPTQ.

        Returns:
            Codes, int8 [K, N], and scales, float16 numbers in float32 [N].

        Raises:
            CheckpointError: the matrix cannot be read.
        """
        # Codes are packed in pairs.
        one_block, inputs = WeightFormat(bits, linear.columns + linear.columns % 2), self.statistics(linear.name)
        rows = gptq_rows(self.source.read(name), one_block, inputs, scales_of=_symmetric_rows)
        codes = unpack_codes(rows.packed, bits)[:, 0, : linear.columns].T.astype(np.int16) - (1 << (bits - 1))
        return np.ascontiguousarray(codes, np.int8), rows.scales[:, 0]


def integer_range(values: Float32Array, bits: int) -> tuple[npt.NDArray[np.float16], npt.NDArray[Any]]:
    """Scale and zero point, unsigned, with which integers reach the range [2, channels] of values; 0 is exact."""
    exact = max(float(np.ptp(values)) / ((1 << bits) - 1), _LEAST_SCALE)
    # The next float16 number above, so that the largest values are not cut off.
    scale = np.nextafter(np.float16(exact), np.float16(np.inf))
    return np.array(scale), np.array(round(-float(values.min()) / float(scale)), np.uint8 if bits == 8 else np.uint16)


def _symmetric_rows(
    weights: Float32Array, weight_format: WeightFormat, inputs: InputStatistics | None = None
) -> QuantizedRows:
    """Quantize rows [N, K] with one positive float16 scale each, that of the least squared error; see `Quantizer`."""
    importance = np.ones(weights.shape[1], np.float32) if inputs is None else inputs.mean_square
    largest, half = np.abs(weights).max(axis=1, keepdims=True), 1 << (weight_format.bits - 1)
    best, least = np.empty_like(largest), np.full(largest.shape, np.inf)
    for shrink in _SHRINKS[weight_format.bits]:
        scales = half_precision(np.maximum(largest * np.float32(shrink / (half - 1)), np.float32(_LEAST_SCALE)))
        rounded = np.clip(np.rint(weights / scales), -half, half - 1) * scales
        error = np.square(rounded - weights) @ importance[:, None]
        best, least = np.where(error < least, scales, best), np.minimum(error, least)
    return rounded_rows(in_blocks(weights, weight_format), best, None, weight_format.bits)
