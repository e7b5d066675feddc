"""Low-rank correction of quantization errors (QERA-exact).

For errors E = W - W^ and second moments R of the inputs x, the mean square of (E - U D) x over all products U D of a
given rank is smallest where the columns of U are the first eigenvectors of E R ET and D = UT E. The paper (Source:
Zhang et al., 2024) uses the square root of R and a singular value decomposition; this derivation needs neither.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...errors import InputError
from ...models.manifest import WeightFormat
from ..checkpoint.source import Float32Array, LowRankFactors
from .codes import FACTOR_FORMAT, InputStatistics, quantize_rows

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LowRankCorrection:
    """The correction `up` @ `down` of rounded weights, in float32."""

    down: Float32Array
    """[rank, K]."""
    up: Float32Array
    """[N, rank], with orthonormal columns."""
    residual_error: float
    """Fraction of the output's squared error that remains, before the factors are quantized."""


def low_rank_correction(errors: Float32Array, inputs: InputStatistics, rank: int) -> LowRankCorrection:
    """Compute the optimal correction of that rank.

    Args:
        errors: weights minus quantized weights, float32 [N, K].
        inputs: statistics of the K inputs; without second moments they count as uncorrelated.
        rank: from 1 to the smaller of N and K.

    Raises:
        InputError: the rank is out of range, or the moments are not finite numbers of shape [K, K].
    """
    rows, columns = errors.shape
    if not 1 <= rank <= min(rows, columns):
        raise InputError(
            f"a matrix of {rows} x {columns} cannot have a correction of rank {rank}", "choose a smaller rank"
        )
    moments = np.diag(inputs.mean_square) if inputs.second_moment is None else inputs.second_moment
    if moments.shape != (columns, columns) or not np.isfinite(moments).all():
        raise InputError(f"the second moments of {columns} inputs must be {columns} x {columns} finite numbers")
    exact, squares = errors.astype(np.float64), moments.astype(np.float64)
    vectors, fraction = (
        _eigenvectors_by_rows(exact, squares, rank)
        if rows <= columns
        else _eigenvectors_by_columns(exact, squares, rank)
    )
    return LowRankCorrection((vectors.T @ exact).astype(np.float32), vectors.astype(np.float32), 1 - fraction)


def correction_factors(errors: Float32Array, inputs: InputStatistics, weight_format: WeightFormat) -> LowRankFactors:
    """Quantize the optimal correction of the format's rank; see `low_rank_correction`."""
    correction = low_rank_correction(errors, inputs, weight_format.rank)
    # Columns of one block share a scale. So each column of `up` gets the same length as its row of `down`.
    lengths = np.sqrt(np.linalg.norm(correction.down, axis=1))
    inverse = np.divide(1, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    down = quantize_rows(correction.down * inverse[:, None], FACTOR_FORMAT)
    return LowRankFactors(*down, *quantize_rows(correction.up * lengths, FACTOR_FORMAT))


def _eigenvectors_by_rows(errors: Float64Array, moments: Float64Array, rank: int) -> tuple[Float64Array, float]:
    """Return the first eigenvectors of E R ET, [N, rank], and their fraction of its trace."""
    values, vectors = np.linalg.eigh(errors @ moments @ errors.T)
    return vectors[:, ::-1][:, :rank], _leading_fraction(values, rank)


def _eigenvectors_by_columns(errors: Float64Array, moments: Float64Array, rank: int) -> tuple[Float64Array, float]:
    """Return the same from a K x K matrix: with R = L LT, they are E L v for the eigenvectors v of LT ET E L."""
    sizes, directions = np.linalg.eigh(moments)
    # The moments of few tokens have low rank, and their other eigenvalues may be negative in float32.
    weighted = errors @ (directions * np.sqrt(np.maximum(sizes, 0)))
    values, vectors = np.linalg.eigh(weighted.T @ weighted)
    # Vectors of length 0 have no direction; the QR decomposition replaces them with orthogonal ones.
    orthogonal, _ = np.linalg.qr(weighted @ vectors[:, ::-1][:, :rank])
    return orthogonal, _leading_fraction(values, rank)


def _leading_fraction(values: Float64Array, rank: int) -> float:
    """Fraction of the largest `rank` eigenvalues in the sum of all."""
    total = float(np.maximum(values, 0).sum())
    return float(np.maximum(values[-rank:], 0).sum()) / total if total > 0 else 1.0
