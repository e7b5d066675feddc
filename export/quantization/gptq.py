"""GPTQ with static groups: each column compensates for the rounding errors of those before it.

The error of the output is E H ET for errors E = w - w^ of a row and second moments H of the inputs. With H = U D UT,
where U is upper triangular with a unit diagonal, that is the sum over columns j of D[j] times the square of (E U)[j] =
E[j] + sum over i < j of E[i] U[i, j]. So columns are rounded one after the other, each after adding the errors so far
to its weight. This equals the updates by the inverse of H in the original (Source: Frantar et al., 2022; Chee et al.,
2023, QuIP, theorem 6), and needs one Cholesky factor and no inverse.

Columns are processed in the order of decreasing second moments, since errors of the last ones are not compensated.
Scales and zero points are chosen before by k-quant on the original weights, so the order does not affect the format.
The importance of a column is D, the cost of an error there after compensation by later columns.

The factorization is computed once per linear, for all rows and formats. All computations use float64, so that codes do
not depend on which rows are processed together.
"""

from __future__ import annotations

import threading
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from ...models.manifest import WeightFormat
from ..checkpoint.source import QuantizedRows
from .codes import Float32Array, InputStatistics, pack_codes, second_moments, unpack_zero_points
from .k_quant import k_quant_rows

Float64Array = npt.NDArray[np.float64]

_DAMPING: Final = 0.01
"""Added to the diagonal, as a fraction of its mean, for directions that the calibration text lacks."""
_COLUMN_GROUP: Final = 32
"""Columns that are processed one by one; the errors of earlier groups are added in one product."""


_Factorization = tuple[npt.NDArray[np.intp], Float64Array, Float32Array]
"""Columns in processing order, U in that order with unused values below the diagonal, and D in the original order."""
_factorizations: Final[WeakKeyDictionary[InputStatistics, _Factorization]] = WeakKeyDictionary()
_lock: Final = threading.Lock()


def gptq_rows(
    weights: Float32Array, weight_format: WeightFormat, inputs: InputStatistics | None = None
) -> QuantizedRows:
    """Quantize rows by GPTQ, or by k-quant where second moments are unknown; see `methods.Quantizer`.

    Raises:
        InputError: the second moments do not have the shape [K, K] or are not finite.
    """
    if inputs is None or inputs.second_moment is None or not inputs.mean_square.any():
        return k_quant_rows(weights, weight_format, inputs)
    with _lock:
        factorization = _factorizations.get(inputs) or _factorize(inputs, weights.shape[1])
        _factorizations[inputs] = factorization
    order, upper, importance = factorization
    k_quant = k_quant_rows(weights, weight_format, InputStatistics(importance, inputs.mean_magnitude))
    codes = _codes(weights, weight_format, k_quant, order, upper)
    return k_quant._replace(packed=pack_codes(codes, weight_format.bits))


def _codes(
    weights: Float32Array,
    weight_format: WeightFormat,
    k_quant: QuantizedRows,
    order: npt.NDArray[np.intp],
    upper: Float64Array,
) -> npt.NDArray[np.uint8]:
    """Compute codes, uint8 [N, blocks, block], for the scales and zero points of `k_quant`."""
    rows, columns = weights.shape
    blocks, last = k_quant.scales.shape[1], (1 << weight_format.bits) - 1
    # Transposed, so that one column of all rows is contiguous.
    exact = np.ascontiguousarray(weights.T[order], np.float64)
    scales = k_quant.scales.T.astype(np.float64)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    zeros = np.full((blocks, 1), float(1 << (weight_format.bits - 1)))
    if k_quant.zero_points is not None:
        zeros = unpack_zero_points(k_quant.zero_points, blocks, weight_format.bits).T.astype(np.float64)
    errors = np.empty_like(exact)
    codes = np.empty((blocks * weight_format.block, rows), np.uint8)
    codes.reshape(blocks, weight_format.block, rows)[:] = zeros[:, None].astype(np.uint8)  # padding of the last block
    for start in range(0, columns, _COLUMN_GROUP):
        stop = min(start + _COLUMN_GROUP, columns)
        targets = exact[start:stop] + upper[:start, start:stop].T @ errors[:start]
        for at in range(start, stop):
            block = order[at] // weight_format.block
            column = targets[at - start] * inverse[block]
            column += zeros[block]
            np.rint(column, out=column)
            np.clip(column, 0, last, out=column)
            codes[order[at]] = column
            column -= zeros[block]
            column *= scales[block]
            np.subtract(exact[at], column, out=errors[at])
            targets[at - start + 1 :] += upper[at, at + 1 : stop, None] * errors[at]
    return np.ascontiguousarray(codes.T).reshape(rows, blocks, weight_format.block)


def _factorize(inputs: InputStatistics, columns: int) -> _Factorization:
    moments = second_moments(inputs, columns)
    diagonal = np.diagonal(moments).astype(np.float64)
    order = np.argsort(-diagonal, kind="stable")
    damping = _DAMPING * diagonal.mean()
    # NumPy's Cholesky factor is lower triangular, so it is computed for reversed columns and reversed again.
    reverse = order[::-1]
    while True:
        reversed_moments = moments[np.ix_(reverse, reverse)].astype(np.float64)
        reversed_moments[np.diag_indices(columns)] += damping
        try:
            lower = np.asarray(np.linalg.cholesky(reversed_moments), np.float64)
            break
        except np.linalg.LinAlgError:  # float32 rounding may exceed the damping
            damping *= 10
    upper: Float64Array = lower[::-1, ::-1]
    diagonal_factors: Float64Array = np.diagonal(upper).copy()
    upper /= diagonal_factors
    importance = np.empty(columns, np.float32)
    importance[order] = (diagonal_factors**2 / (diagonal_factors**2).max()).astype(np.float32)
    return order, upper, importance
