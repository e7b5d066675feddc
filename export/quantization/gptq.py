"""GPTQ (Frantar et al., 2022) with static groups: each column's rounding makes up for the errors of those before it.

What counts is the error of the output, E H ET for errors E = w - w^ of a row and second moments H of the inputs. With
H = U D UT, U upper triangular with ones on its diagonal, that is the sum over columns j of D[j] times the square of
(E U)[j] = E[j] + sum over i < j of E[i] U[i, j]. So columns are rounded one after the other, each the sum of its weight
and what the errors so far push into it. That is the same as the original's updates by the inverse of H (Chee et al.,
2023, QuIP, theorem 6), and needs one Cholesky factor and no inverse.

Columns are visited from the largest second moment down, since errors of the last ones are not made up for. Scales and
zero points are chosen before, by k-quant on the weights as they are, so the order leaves no trace in the format. Its
importance of a column is D: what an error there costs once the columns after it have done what they can.

The factor of a unit is made once, whatever the rows and the format. All is in float64, so that which rows are worked
on together moves no code.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from ...errors import InputError
from ...models.manifest import WeightFormat
from ..checkpoint.source import QuantizedRows
from .codes import Float32Array, pack_codes, unpack_zero_points
from .input_statistics import InputStatistics
from .k_quant import k_quant_rows

Float64Array = npt.NDArray[np.float64]

_DAMPING: Final = 0.01
"""Added to the diagonal, as a share of its mean: directions that the text did not have might occur after all."""
_COLUMNS: Final = 32
"""Columns that take each other's errors one by one; those of all earlier ones they take in one product."""


@dataclass(frozen=True)
class _Factor:
    order: npt.NDArray[np.intp]
    """Columns as they are visited."""
    upper: Float64Array
    """U, by that order; what lies below the diagonal is of no use."""
    importance: Float32Array
    """D, by the columns' own order."""


_factors: Final[WeakKeyDictionary[InputStatistics, _Factor]] = WeakKeyDictionary()
_making: Final = threading.Lock()


def gptq_rows(
    weights: Float32Array, weight_format: WeightFormat, inputs: InputStatistics | None = None
) -> QuantizedRows:
    """Rows in few bits; see `methods.Quantizer`. Where no second moments are known this is k-quant.

    Raises:
        InputError: the second moments are not those of as many columns.
    """
    if inputs is None or inputs.second_moment is None or not inputs.mean_square.any():
        return k_quant_rows(weights, weight_format, inputs)
    factor = _factor_of(inputs, weights.shape[1])
    usual = k_quant_rows(weights, weight_format, InputStatistics(factor.importance, inputs.mean_magnitude))
    codes = _codes(weights, weight_format, usual, factor)
    return usual._replace(packed=pack_codes(codes, weight_format.bits))


def _codes(
    weights: Float32Array, weight_format: WeightFormat, usual: QuantizedRows, factor: _Factor
) -> npt.NDArray[np.uint8]:
    """Codes, uint8 [N, blocks, block], for the scales and zero points of `usual`."""
    (rows, columns), upper = weights.shape, factor.upper
    blocks, last = usual.scales.shape[1], (1 << weight_format.bits) - 1
    # One column of all rows is contiguous here.
    exact = weights.T[factor.order].astype(np.float64)
    scales = usual.scales.T.astype(np.float64)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    zeros = np.full((blocks, 1), float(1 << (weight_format.bits - 1)))
    if usual.zero_points is not None:
        zeros = unpack_zero_points(usual.zero_points, blocks, weight_format.bits).T.astype(np.float64)
    errors = np.empty_like(exact)
    codes = np.empty((blocks * weight_format.block, rows), np.uint8)
    codes.reshape(blocks, weight_format.block, rows)[:] = zeros[:, None].astype(np.uint8)  # what pads the last block
    for start in range(0, columns, _COLUMNS):
        stop = min(start + _COLUMNS, columns)
        wanted = exact[start:stop] + upper[:start, start:stop].T @ errors[:start]
        for at in range(start, stop):
            block = factor.order[at] // weight_format.block
            column = wanted[at - start] * inverse[block]
            column += zeros[block]
            np.rint(column, out=column)
            np.clip(column, 0, last, out=column)
            codes[factor.order[at]] = column
            column -= zeros[block]
            column *= scales[block]
            np.subtract(exact[at], column, out=errors[at])
            wanted[at - start + 1 :] += upper[at, at + 1 : stop, None] * errors[at]
    return np.ascontiguousarray(codes.T).reshape(rows, blocks, weight_format.block)


def _factor_of(inputs: InputStatistics, columns: int) -> _Factor:
    with _making:
        if inputs not in _factors:
            _factors[inputs] = _factorized(inputs, columns)
        return _factors[inputs]


def _factorized(inputs: InputStatistics, columns: int) -> _Factor:
    moments = inputs.second_moment
    if moments is None or moments.shape != (columns, columns) or not np.isfinite(moments).all():
        raise InputError(f"the second moments of {columns} columns must be as many rows of as many finite numbers")
    diagonal = np.diagonal(moments).astype(np.float64)
    order = np.argsort(-diagonal, kind="stable")
    damping = _DAMPING * diagonal.mean()
    # A Cholesky factor is lower triangular: it is taken of the columns in reverse, and reversed again.
    reverse = order[::-1]
    while True:
        reversed_moments = moments[np.ix_(reverse, reverse)].astype(np.float64)
        reversed_moments[np.diag_indices(columns)] += damping
        try:
            lower = np.asarray(np.linalg.cholesky(reversed_moments), np.float64)
            break
        except np.linalg.LinAlgError:  # sums in float32 may lie further from a matrix of squares than that
            damping *= 10
    upper: Float64Array = lower[::-1, ::-1]
    sizes: Float64Array = np.diagonal(upper).copy()
    upper /= sizes
    importance = np.empty(columns, np.float32)
    importance[order] = (sizes**2 / (sizes**2).max()).astype(np.float32)
    return _Factor(order, upper, importance)
