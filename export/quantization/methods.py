"""The quantization methods by name, and round-to-nearest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

import numpy as np

from ...models.manifest import Method, WeightFormat
from ..checkpoint.source import QuantizedRows
from .codes import Float32Array, InputStatistics, default_scales, in_blocks, nearest_codes, pack_zero_points
from .gptq import gptq_rows
from .k_quant import k_quant_rows


class Quantizer(Protocol):
    """Quantizes rows of a weight matrix."""

    def __call__(
        self, weights: Float32Array, weight_format: WeightFormat, inputs: InputStatistics | None = None
    ) -> QuantizedRows:
        """Choose codes, scales and, where the format has them, zero points.

        Args:
            weights: float32 [N, K], finite, in any memory order.
            weight_format: 2, 4 or 8 bits, the block size, and whether there are zero points.
            inputs: statistics of the K inputs; None where none are known.

        Raises:
            InputError: the statistics are not K finite numbers of at least 0.
        """
        ...


def nearest_rows(
    weights: Float32Array,
    weight_format: WeightFormat,
    inputs: InputStatistics | None = None,  # noqa: ARG001 -- round-to-nearest does not use them
) -> QuantizedRows:
    """Round rows to nearest: scales and zero points follow from each block's extreme weights. See `Quantizer`."""
    grouped = in_blocks(weights, weight_format)
    scales, zeros = default_scales(grouped, weight_format)
    points = None if zeros is None else pack_zero_points(zeros.astype(np.uint8), weight_format.bits)
    return QuantizedRows(nearest_codes(grouped, scales, weight_format.bits, zeros), scales, zero_points=points)


QUANTIZERS: Final[Mapping[Method, Quantizer]] = {
    Method.RTN: nearest_rows,
    Method.K_QUANT: k_quant_rows,
    Method.GPTQ: gptq_rows,
}
