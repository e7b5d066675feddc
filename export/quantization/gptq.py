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

The error of the outputs is not what counts, but the KL divergence that it causes. To second order that is
trace(G E H ET), where G are the second moments of the gradients at the outputs with respect to the logarithm of the
probability of tokens that the model itself samples: the Fisher information of the weights is about the Kronecker
product of G and H (Martens and Grosse, 2015). With G = V C VT like H above, it is the sum over rows i and columns j of
C[i] D[j] times the square of (VT E U)[i, j], so rows compensate for the errors of rows before them too (Tseng et al.,
2025, YAQA, arXiv:2505.22988).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from ...models.manifest import WeightFormat
from ..checkpoint.source import Float32Array, QuantizedRows
from .codes import Float64Array, InputStatistics, pack_codes, second_moments, unpack_zero_points
from .k_quant import k_quant_rows

_DAMPING: Final = 0.01
"""Added to the diagonal, as a fraction of its mean, for directions that the calibration text lacks."""
_COLUMN_GROUP: Final = 32
"""Columns that are processed one by one; the errors of earlier groups are added in one product."""
_ROW_GROUP: Final = 64
"""Rows that are processed one by one with gradients, likewise."""


_Factorization = tuple[npt.NDArray[np.intp], Float64Array, Float32Array]
"""Columns in processing order, U in that order with unused values below the diagonal, and D in the original order."""
_factorizations: Final[WeakKeyDictionary[InputStatistics, _Factorization]] = WeakKeyDictionary()
_lock: Final = threading.Lock()


def gptq_rows(
    weights: Float32Array,
    weight_format: WeightFormat,
    inputs: InputStatistics | None = None,
    outputs: Float32Array | None = None,
    scales_of: Callable[[Float32Array, WeightFormat, InputStatistics | None], QuantizedRows] = k_quant_rows,
) -> QuantizedRows:
    """Quantize rows by GPTQ, or by `scales_of` where second moments are unknown; see `methods.Quantizer`.

    `outputs` are the second moments of the gradients at the outputs of these rows, float32 [N, N], finite; None to
    minimize the error of the outputs.

    Raises:
        InputError: the second moments of the inputs do not have the shape [K, K] or are not finite.
    """
    if inputs is None or inputs.second_moment is None or not inputs.mean_square.any():
        return scales_of(weights, weight_format, inputs)
    with _lock:
        factorization = _factorizations.get(inputs) or _factorize(second_moments(inputs, weights.shape[1]))
        _factorizations[inputs] = factorization
    order, upper, importance = factorization
    row_order, row_upper = np.arange(len(weights)), None
    if outputs is not None and outputs.any():
        row_order, row_upper, _ = _factorize(outputs)
        weights = weights[row_order]
    k_quant = scales_of(weights, weight_format, InputStatistics(importance, inputs.mean_magnitude))
    codes = _codes(weights, weight_format, k_quant, order, upper, row_upper)
    rounded, back = k_quant._replace(packed=pack_codes(codes, weight_format.bits)), np.argsort(row_order)
    parts: list[Any] = [None if each is None else each[back] for each in rounded]
    return QuantizedRows(*parts)


class _Grid(NamedTuple):
    """What codes of some weights stand for; arrays are float64 [columns, rows]."""

    scales: Float64Array
    inverse: Float64Array
    zeros: Float64Array
    last: int
    """The largest code."""

    def mapped(self, change: Callable[[Float64Array], Float64Array]) -> _Grid:
        """The same for other places, or in another shape."""
        return _Grid(change(self.scales), change(self.inverse), change(self.zeros), self.last)

    def rounded(self, targets: Float64Array, place: Any) -> tuple[Float64Array, Float64Array]:
        """The codes that are nearest to targets at a place, and the weights that they stand for."""
        codes = targets * self.inverse[place]
        codes += self.zeros[place]
        np.rint(codes, out=codes)
        np.clip(codes, 0, self.last, out=codes)
        weights = codes - self.zeros[place]
        weights *= self.scales[place]
        return codes, weights


def _codes(
    weights: Float32Array,
    weight_format: WeightFormat,
    k_quant: QuantizedRows,
    order: npt.NDArray[np.intp],
    upper: Float64Array,
    row_upper: Float64Array | None,
) -> npt.NDArray[np.uint8]:
    """Compute codes, uint8 [N, blocks, block], for the scales and zero points of `k_quant`."""
    rows, columns = weights.shape
    blocks, last = k_quant.scales.shape[1], (1 << weight_format.bits) - 1
    # Transposed, so that one column of all rows is contiguous.
    exact = np.ascontiguousarray(weights.T[order], np.float64)
    scales = k_quant.scales.T.astype(np.float64)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    zeros = np.full((blocks, rows), float(1 << (weight_format.bits - 1)))
    if k_quant.zero_points is not None:
        zeros = unpack_zero_points(k_quant.zero_points, blocks, weight_format.bits).T.astype(np.float64)
    errors = np.empty_like(exact)
    codes = np.empty((blocks * weight_format.block, rows), np.uint8)
    codes.reshape(blocks, weight_format.block, rows)[:] = zeros[:, None].astype(np.uint8)  # padding of the last block
    for start in range(0, columns, _COLUMN_GROUP):
        group = slice(start, min(start + _COLUMN_GROUP, columns))
        carried = upper[:start, group].T @ errors[:start]
        of_block = order[group] // weight_format.block
        grid = _Grid(scales[of_block], inverse[of_block], zeros[of_block], last)
        if row_upper is None:
            codes[order[group]], errors[group] = _by_columns(exact[group], carried, upper[group, group], grid)
        else:
            found = _by_tiles(exact[group], carried, upper[group, group], row_upper, grid)
            codes[order[group]], errors[group] = found
    return np.ascontiguousarray(codes.T).reshape(rows, blocks, weight_format.block)


def _by_columns(
    exact: Float64Array, carried: Float64Array, upper: Float64Array, grid: _Grid
) -> tuple[Float64Array, Float64Array]:
    """Codes and errors of a group of columns, each float64 [columns, N].

    Args:
        exact: The weights.
        carried: For each weight (E U)[j] without its own term and those of the group.
        upper: U of the group.
        grid: Codes of the group.
    """
    targets, codes, errors = exact + carried, np.empty_like(exact), np.empty_like(exact)
    for at in range(len(exact)):
        codes[at], weights = grid.rounded(targets[at], at)
        np.subtract(exact[at], weights, out=errors[at])
        targets[at + 1 :] += upper[at, at + 1 :, None] * errors[at]
    return codes, errors


def _by_tiles(
    exact: Float64Array, carried: Float64Array, upper: Float64Array, row_upper: Float64Array, grid: _Grid
) -> tuple[Float64Array, Float64Array]:
    """Codes and errors as in `_by_columns`, with rows that compensate too; `row_upper` is V."""
    rows = exact.shape[1]
    codes, errors, sums = (np.empty_like(exact) for _ in range(3))
    for start in range(0, rows, _ROW_GROUP):
        group = slice(start, min(start + _ROW_GROUP, rows))
        from_rows = sums[:, :start] @ row_upper[:start, group]
        own, of_rows = (exact[:, group], carried[:, group], from_rows), row_upper[group, group]
        tile = _tile(own, upper, of_rows, grid.mapped(lambda each: np.ravel(each[:, group])))  # noqa: B023 -- at once
        codes[:, group], errors[:, group], sums[:, group] = tile
    return codes, errors


def _tile(
    group: tuple[Float64Array, Float64Array, Float64Array],
    upper: Float64Array,
    row_upper: Float64Array,
    grid: _Grid,
) -> tuple[Float64Array, Float64Array, Float64Array]:
    """Codes, errors and E U of a group of columns and rows, each float64 [columns, rows].

    A weight depends on those of earlier columns and rows, so the weights of a diagonal are rounded together.

    Args:
        group: The weights; (E U)[i, j] without terms of the group; (VT E U)[i, j] without rows of the group.
        upper: U of the group.
        row_upper: V of the group.
        grid: Codes of the group, its arrays flat.
    """
    (columns, rows), (exact, carried, from_rows) = group[0].shape, map(np.ravel, group)
    above, before = np.ascontiguousarray(np.triu(upper, 1).T), np.ascontiguousarray(np.triu(row_upper, 1).T)
    codes, errors, sums = (np.zeros((columns, rows)) for _ in range(3))
    for step in range(columns + rows - 1):
        first, stop = max(0, step - rows + 1), min(columns, step + 1)
        place = slice(step + first * (rows - 1), step + (stop - 1) * (rows - 1) + 1, max(1, rows - 1))
        at_column, at_row = slice(first, stop), slice(step - first, step - stop if step >= stop else None, -1)
        carry = carried[place] + np.einsum("nk,nk->n", errors.T[at_row], above[at_column])
        target = exact[place] + carry + from_rows[place] + np.einsum("nk,nk->n", sums[at_column], before[at_row])
        codes.reshape(-1)[place], weights = grid.rounded(target, place)
        error = exact[place] - weights
        errors.reshape(-1)[place], sums.reshape(-1)[place] = error, carry + error
    return codes, errors, sums


def _factorize(moments: Float32Array) -> _Factorization:
    columns = len(moments)
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
