"""Rounding to nearest: scales and zero points are read off the extreme weights of a block (see `codes`)."""

from __future__ import annotations

import numpy as np

from ...models.manifest import WeightFormat
from ..checkpoint.source import QuantizedRows
from .codes import Float32Array, in_blocks, nearest_codes, pack_zero_points, usual_scales
from .input_statistics import InputStatistics


def nearest_rows(
    weights: Float32Array,
    form: WeightFormat,
    inputs: InputStatistics | None = None,  # noqa: ARG001 -- they have no say where the extremes decide
) -> QuantizedRows:
    """Rows in few bits; see `methods.Quantizer`."""
    grouped = in_blocks(weights, form)
    scales, zeros = usual_scales(grouped, form)
    points = None if zeros is None else pack_zero_points(zeros.astype(np.uint8), form.bits)
    return QuantizedRows(nearest_codes(grouped, scales, form.bits, zeros), scales, zero_points=points)
