"""HQQ, half-quadratic quantization (Badri and Shaji, 2023).

The error's p-norm with p < 1 is minimized, which forgives a few large errors for many small ones. By turns: codes are
rounded; what they leave is split into a sparse part, by the shrinkage of the p-norm, and a rest; and the one thing that
is not fixed is fitted to the weights without the sparse part.

With zero points that is, as in the original, the zero point in fractions of a code, for the usual scale. The fast
kernels take whole ones, so it is rounded at the end. Without, the zero point stays in the middle and the scale is what
moves. Lengths are measured in steps of a block's usual scale. At the end the scale is fitted by least squares, and that
of rounding to nearest is kept where it leaves less squared error.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ...models.manifest import WeightFormat
from ..checkpoint.source import QuantizedRows
from .codes import Float32Array, centred_zeros, powers_of_two
from .input_statistics import InputStatistics
from .scale_search import Candidates, fit, rounded, search_scales

_NORM: Final = 0.7
_STIFFNESS: Final = 10.0
_STIFFENING: Final = 1.01
_ROUNDS: Final = 20
_SETTLED: Final = 1e-4
"""A block whose scale or zero point moves by no more is done."""


def hqq_rows(
    weights: Float32Array, weight_format: WeightFormat, inputs: InputStatistics | None = None
) -> QuantizedRows:
    """Rows in few bits; see `methods.Quantizer`."""
    return search_scales(weights, weight_format, inputs, _search_zeros if weight_format.zero_points else _search)


def _search(candidates: Candidates) -> None:
    linears, shares, bits = candidates.linears, candidates.shares, candidates.weight_format.bits
    scales = np.ones(len(linears), np.float32)
    candidates.offer(scales)
    stiffness = _STIFFNESS
    moving = np.arange(len(linears))
    for _ in range(_ROUNDS):
        # A block stops for itself: its scale must not depend on which rows are rounded together.
        part = None if shares is None else shares[moving]
        fitted = _fitted_scales(linears[moving], part, scales[moving], bits, stiffness)
        moved = np.abs(fitted - scales[moving]) > _SETTLED
        scales[moving] = fitted
        moving = moving[moved]
        stiffness *= _STIFFENING
    candidates.offer(powers_of_two(scales) if candidates.weight_format.powers_of_two else scales)


def _fitted_scales(
    linears: Float32Array, shares: Float32Array | None, scales: Float32Array, bits: int, stiffness: float
) -> Float32Array:
    """The scales after one round."""
    codes = rounded(linears, scales, bits)
    dense = linears - _shrunk(linears - codes * scales[:, None], stiffness)
    match, power = fit(dense, codes, shares)
    fitted: Float32Array = scales.copy()
    np.divide(match, power, out=fitted, where=power > 0)
    return fitted


def _search_zeros(candidates: Candidates) -> None:
    linears, shares, bits = candidates.linears, candidates.shares, candidates.weight_format.bits
    last = (1 << bits) - 1
    ones = np.ones(len(linears), np.float32)
    zeros = centred_zeros(linears, ones, bits)
    candidates.offer(ones, zeros)
    stiffness = _STIFFNESS
    moving = np.arange(len(linears))
    for _ in range(_ROUNDS):
        fitted = _fitted_zeros(
            linears[moving], None if shares is None else shares[moving], zeros[moving], last, stiffness
        )
        moved = np.abs(fitted - zeros[moving]) > _SETTLED
        zeros[moving] = fitted
        moving = moving[moved]
        stiffness *= _STIFFENING
    candidates.offer(ones, np.clip(np.rint(zeros), 0, last))


def _fitted_zeros(
    linears: Float32Array, shares: Float32Array | None, zeros: Float32Array, last: int, stiffness: float
) -> Float32Array:
    """The zero points, in fractions of a code, after one round with scales of 1."""
    codes = np.clip(np.rint(linears + zeros[:, None]), 0, last)
    dense = linears - _shrunk(linears - (codes - zeros[:, None]), stiffness)
    shares = np.ones_like(linears) if shares is None else shares
    fitted: Float32Array = ((codes - dense) * shares).sum(axis=1) / shares.sum(axis=1)
    return fitted


def _shrunk(left: Float32Array, stiffness: float) -> Float32Array:
    """The sparse part of what codes leave: |r| - |r| ** (p - 1) / stiffness with r's sign, 0 where that is negative."""
    size: Float32Array = np.maximum(np.abs(left), np.float32(1e-6))
    size -= size ** np.float32(_NORM - 1) * np.float32(1 / stiffness)
    np.maximum(size, 0, out=size)
    np.copysign(size, left, out=size)
    return size
