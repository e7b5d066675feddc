"""HQQ, half-quadratic quantization (Source: Badri and Shaji, 2023).

It minimizes the p-norm of the error with p < 1, which accepts a few large errors in exchange for many small ones. Each
round computes codes, splits their error into a sparse part (by the shrinkage of the p-norm) and a dense part, and fits
the free parameter to the weights without the sparse part.

With zero points, the free parameter is the zero point in fractions of a code, as in the paper, at the scale of
round-to-nearest. The fast kernels need integers, so it is rounded at the end. Without zero points, the free parameter
is the scale. Weights are normalized by the scale of round-to-nearest. At the end the scale is fitted by least squares;
round-to-nearest is kept where its squared error is smaller.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ...models.manifest import WeightFormat
from ..checkpoint.source import QuantizedRows
from .codes import Float32Array, centered_zeros, powers_of_two
from .input_statistics import InputStatistics
from .scale_search import Candidates, fit, rounded, search_scales

_NORM: Final = 0.7
_STIFFNESS: Final = 10.0
_STIFFENING: Final = 1.01
_ROUNDS: Final = 20
_CONVERGED: Final = 1e-4
"""Blocks whose scale or zero point changes by no more are finished."""


def hqq_rows(
    weights: Float32Array, weight_format: WeightFormat, inputs: InputStatistics | None = None
) -> QuantizedRows:
    """Quantize rows by HQQ; see `methods.Quantizer`."""
    return search_scales(weights, weight_format, inputs, _search_zeros if weight_format.zero_points else _search)


def _search(candidates: Candidates) -> None:
    normalized, importance, bits = candidates.normalized, candidates.importance, candidates.weight_format.bits
    scales = np.ones(len(normalized), np.float32)
    candidates.offer(scales)
    stiffness = _STIFFNESS
    active = np.arange(len(normalized))
    for _ in range(_ROUNDS):
        # Each block stops by itself: its scale must not depend on which rows are quantized together.
        part = None if importance is None else importance[active]
        fitted = _fitted_scales(normalized[active], part, scales[active], bits, stiffness)
        changed = np.abs(fitted - scales[active]) > _CONVERGED
        scales[active] = fitted
        active = active[changed]
        stiffness *= _STIFFENING
    candidates.offer(powers_of_two(scales) if candidates.weight_format.powers_of_two else scales)


def _fitted_scales(
    normalized: Float32Array, importance: Float32Array | None, scales: Float32Array, bits: int, stiffness: float
) -> Float32Array:
    """Return the scales after one round."""
    codes = rounded(normalized, scales, bits)
    dense = normalized - _sparse_part(normalized - codes * scales[:, None], stiffness)
    match, power = fit(dense, codes, importance)
    fitted: Float32Array = scales.copy()
    np.divide(match, power, out=fitted, where=power > 0)
    return fitted


def _search_zeros(candidates: Candidates) -> None:
    normalized, importance, bits = candidates.normalized, candidates.importance, candidates.weight_format.bits
    last = (1 << bits) - 1
    ones = np.ones(len(normalized), np.float32)
    zeros = centered_zeros(normalized, ones, bits)
    candidates.offer(ones, zeros)
    stiffness = _STIFFNESS
    active = np.arange(len(normalized))
    for _ in range(_ROUNDS):
        fitted = _fitted_zeros(
            normalized[active], None if importance is None else importance[active], zeros[active], last, stiffness
        )
        changed = np.abs(fitted - zeros[active]) > _CONVERGED
        zeros[active] = fitted
        active = active[changed]
        stiffness *= _STIFFENING
    candidates.offer(ones, np.clip(np.rint(zeros), 0, last))


def _fitted_zeros(
    normalized: Float32Array, importance: Float32Array | None, zeros: Float32Array, last: int, stiffness: float
) -> Float32Array:
    """Return the zero points, in fractions of a code, after one round with scales of 1."""
    codes = np.clip(np.rint(normalized + zeros[:, None]), 0, last)
    dense = normalized - _sparse_part(normalized - (codes - zeros[:, None]), stiffness)
    importance = np.ones_like(normalized) if importance is None else importance
    fitted: Float32Array = ((codes - dense) * importance).sum(axis=1) / importance.sum(axis=1)
    return fitted


def _sparse_part(errors: Float32Array, stiffness: float) -> Float32Array:
    """Sparse part of errors r: |r| - |r| ** (p - 1) / stiffness with the sign of r, or 0 where that is negative."""
    size: Float32Array = np.maximum(np.abs(errors), np.float32(1e-6))
    size -= size ** np.float32(_NORM - 1) * np.float32(1 / stiffness)
    np.maximum(size, 0, out=size)
    np.copysign(size, errors, out=size)
    return size
