"""HQQ, half-quadratic quantization (Badri and Shaji, 2023), for scales without zero points.

The error's p-norm with p < 1 is minimized, which forgives a few large errors for many small ones. By turns: codes are
rounded for the scale; what they leave is split into a sparse part, by the shrinkage of the p-norm, and a rest; the
scale is fitted to the weights without the sparse part. The original fits the zero point, in fractions of a code, which
the fast kernels do not take; here the zero point stays in the middle and the scale is what moves. Lengths are measured
in steps of a block's usual scale. At the end the scale is fitted by least squares, and that of rounding to nearest is
kept where it leaves less squared error.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ...models.manifest import WeightFormat
from ..source import Coded
from .codes import Float32Array
from .scale_search import BestFit, fit, rounded, search_scales
from .statistics import InputStatistics

_NORM: Final = 0.7
_STIFFNESS: Final = 10.0
_STIFFENING: Final = 1.01
_ROUNDS: Final = 20
_SETTLED: Final = 1e-4
"""A block whose scale moves by no more is done."""


def hqq_rows(weights: Float32Array, form: WeightFormat, inputs: InputStatistics | None = None) -> Coded:
    """Rows in few bits; see `methods.Quantizer`."""
    return search_scales(weights, form, None if inputs is None else inputs.mean_square, _search)


def _search(units: Float32Array, shares: Float32Array | None, bits: int) -> Float32Array:
    scales = np.ones(len(units), np.float32)
    best = BestFit(units, shares)
    best.offer(rounded(units, scales, bits))
    stiffness = _STIFFNESS
    moving = np.arange(len(units))
    for _ in range(_ROUNDS):
        # A block stops for itself: its scale must not depend on which rows are rounded together.
        fitted = _fitted(units[moving], None if shares is None else shares[moving], scales[moving], bits, stiffness)
        moved = np.abs(fitted - scales[moving]) > _SETTLED
        scales[moving] = fitted
        moving = moving[moved]
        stiffness *= _STIFFENING
    best.offer(rounded(units, scales, bits))
    return best.scales


def _fitted(
    units: Float32Array, shares: Float32Array | None, scales: Float32Array, bits: int, stiffness: float
) -> Float32Array:
    """The scales after one round."""
    codes = rounded(units, scales, bits)
    dense = units - _shrunk(units - codes * scales[:, None], stiffness)
    match, power = fit(dense, codes, shares)
    fitted: Float32Array = scales.copy()
    np.divide(match, power, out=fitted, where=power > 0)
    return fitted


def _shrunk(left: Float32Array, stiffness: float) -> Float32Array:
    """The sparse part of what codes leave: |r| - |r| ** (p - 1) / stiffness with r's sign, 0 where that is negative."""
    size: Float32Array = np.maximum(np.abs(left), np.float32(1e-6))
    size -= size ** np.float32(_NORM - 1) * np.float32(1 / stiffness)
    np.maximum(size, 0, out=size)
    np.copysign(size, left, out=size)
    return size
