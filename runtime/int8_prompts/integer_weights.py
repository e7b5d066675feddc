"""Weights as 8-bit integers with one scale for each output, decoded from a model's own codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from .block_codes import BlockMatrix, Floats

_BLOCK_WEIGHTS: Final = 1 << 20
"""Weights that are decoded at a time: 4 MB as floats."""


@dataclass(frozen=True)
class IntegerRange:
    """Largest magnitudes of the integers in a product."""

    activation: int
    """That of quantized activations, which are stored with this number added to them, as bytes."""
    weight: int


FULL_RANGE: Final = IntegerRange(127, 127)
NARROW_RANGE: Final = IntegerRange(90, 91)
"""For processors that add two products in 16 bits, which have to stay below 2 ** 15: stored activations go up to 180,
and 2 * 180 * 91 = 32,760. The two ranges are of one size because the errors of both add up."""


@dataclass(frozen=True)
class IntegerMatrix:
    """A matrix of weights, (integers * scales).T of what `BlockMatrix` decodes to."""

    integers: npt.NDArray[np.int8]
    """`[columns, rows]`."""
    scales: Floats
    """`[rows]`."""


def to_integers(
    matrix: BlockMatrix,
    limit: int,
    *,
    rows: slice = slice(None),
    column_factors: Floats | None = None,
    row_factors: Floats | None = None,
) -> IntegerMatrix:
    """Round a matrix to integers from `-limit` to `limit`, the largest weight of each output becoming the largest.

    Args:
        matrix: the weights.
        limit: largest integer, at most 127.
        rows: the rows to take.
        column_factors: what the weights of each input are multiplied with, `[columns]`; those of SmoothQuant (Xiao et
            al., 2023), by which the inputs are divided.
        row_factors: what the weights of each output are multiplied with, `[rows taken]`.
    """
    first, last, _ = rows.indices(matrix.rows)
    integers = np.empty((matrix.columns, last - first), np.int8)
    scales = np.empty(last - first, np.float32)
    step = max(1, _BLOCK_WEIGHTS // matrix.columns)
    for start in range(first, last, step):
        weights = matrix.decoded(start, min(start + step, last))
        if column_factors is not None:
            weights *= column_factors
        part = slice(start - first, start - first + len(weights))
        largest = np.abs(weights).max(axis=1)
        scale = np.where(largest > 0, largest / np.float32(limit), np.float32(1))
        np.rint(weights / scale[:, None], out=weights)
        integers[:, part] = weights.T
        scales[part] = scale
    return IntegerMatrix(integers, scales if row_factors is None else scales * row_factors)
