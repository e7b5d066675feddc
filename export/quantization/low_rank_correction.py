"""QERA-exact (Zhang et al., 2024): the product of two thin matrices that makes up best for what rounding left.

For errors E = W - W^ and second moments R of the inputs x, the mean square of (E - U D) x over all products U D of a
given rank is least where the columns of U are the first eigenvectors of E R ET and D = UT E. The paper gets there by
the square root of R and a singular value decomposition; this needs neither.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...errors import InputError
from ...models.manifest import WeightFormat
from ..checkpoint.source import Float32Array, LowRankFactors
from .codes import factor_format, quantize_rows
from .input_statistics import InputStatistics

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LowRankCorrection:
    """What is to be added to rounded weights: `up` @ `down`."""

    down: Float32Array
    """[rank, K]."""
    up: Float32Array
    """[N, rank], its columns of length 1 and at right angles."""
    left: float
    """Share of the output's squared error that remains, before these are rounded in their turn."""


def repair(errors: Float32Array, inputs: InputStatistics, rank: int) -> LowRankCorrection:
    """The best repair of that rank.

    Args:
        errors: weights less rounded weights, float32 [N, K].
        inputs: what is known of the K inputs; without second moments they count as unrelated.
        rank: from 1 to the smaller of N and K.

    Raises:
        InputError: there is no such rank, or the moments are not those of K columns.
    """
    rows, columns = errors.shape
    if not 1 <= rank <= min(rows, columns):
        raise InputError(f"a matrix of {rows} x {columns} has no repair of rank {rank}")
    moments = np.diag(inputs.mean_square) if inputs.second_moment is None else inputs.second_moment
    if moments.shape != (columns, columns) or not np.isfinite(moments).all():
        raise InputError(f"the second moments of {columns} columns must be as many rows of as many finite numbers")
    exact, squares = errors.astype(np.float64), moments.astype(np.float64)
    vectors, share = _by_rows(exact, squares, rank) if rows <= columns else _by_columns(exact, squares, rank)
    return LowRankCorrection((vectors.T @ exact).astype(np.float32), vectors.astype(np.float32), 1 - share)


def correction_factors(errors: Float32Array, inputs: InputStatistics, weight_format: WeightFormat) -> LowRankFactors:
    """The best repair of the format's rank, as it is stored; arguments and errors are those of `repair`."""
    found, stored = repair(errors, inputs, weight_format.rank), factor_format(weight_format)
    # Columns of one block share a scale: each is as long here as its row of the other matrix, by the root of both.
    sizes = np.sqrt(np.linalg.norm(found.down, axis=1))
    shares = np.divide(1, sizes, out=np.zeros_like(sizes), where=sizes > 0)
    down = quantize_rows(found.down * shares[:, None], stored)
    return LowRankFactors(*down, *quantize_rows(found.up * sizes, stored))


def _by_rows(errors: Float64Array, moments: Float64Array, rank: int) -> tuple[Float64Array, float]:
    """First eigenvectors of E R ET [N, rank], and their share of its trace."""
    values, vectors = np.linalg.eigh(errors @ moments @ errors.T)
    return vectors[:, ::-1][:, :rank], _share(values, rank)


def _by_columns(errors: Float64Array, moments: Float64Array, rank: int) -> tuple[Float64Array, float]:
    """The same by way of a K x K matrix: with R = L LT, they are E L v for the eigenvectors v of LT ET E L."""
    sizes, directions = np.linalg.eigh(moments)
    # Moments of few tokens have no more directions than those, and in float32 less than none of the others.
    weighted = errors @ (directions * np.sqrt(np.maximum(sizes, 0)))
    values, vectors = np.linalg.eigh(weighted.T @ weighted)
    # What has no length is no direction; the decomposition finds some other at right angles.
    orthogonal, _ = np.linalg.qr(weighted @ vectors[:, ::-1][:, :rank])
    return orthogonal, _share(values, rank)


def _share(values: Float64Array, rank: int) -> float:
    """Of the largest `rank` eigenvalues in their sum."""
    total = float(np.maximum(values, 0).sum())
    return float(np.maximum(values[-rank:], 0).sum()) / total if total > 0 else 1.0
