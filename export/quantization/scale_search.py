"""What the methods share that look for the scale of each block: `k_quant` and `hqq`.

They work on weights in units of the scale that rounding to nearest would take, so that no magnitude overflows and a
scale of 1 is where the search begins. Codes are then the nearest ones: for a given scale and zero point nothing has
less error, whatever the importance of the weights. Where scales are to be powers of two the usual ones are, and so are
all that are found in units of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from ...errors import InputError
from ...models.manifest import WeightFormat
from ..checkpoint.source import QuantizedRows
from .codes import Float32Array, default_scales, in_blocks, nearest_codes, pack_zero_points, powers_of_two
from .input_statistics import InputStatistics

_CHUNK: Final = 1 << 16
"""Weights worked on at a time: a handful of arrays of as many stay in a core's cache."""


class Candidates:
    """Blocks, and of the scales and zero points offered for them those with the least squared error."""

    def __init__(self, linears: Float32Array, shares: Float32Array | None, weight_format: WeightFormat) -> None:
        """Begin with scales of 0.

        Args:
            units: the weights in units of their blocks' usual scales, float32 [n, block].
            shares: their importance, [n, block], or None where all count the same.
            weight_format: bits, and what scales and zero points may be.
        """
        self.linears: Final = linears
        self.shares: Final = shares
        self.weight_format: Final = weight_format
        self.scales: Float32Array = np.zeros(len(linears), np.float32)
        """The best scales so far."""
        self.zeros: Float32Array = np.full(len(linears), 1 << (weight_format.bits - 1), np.float32)
        """Their zero points, whole numbers; the middle code where the format has none."""
        self._gain = np.zeros(len(linears), np.float32)

    def offer(self, scales: Float32Array, zeros: Float32Array | None = None) -> None:
        """Consider the codes nearest for these scales and zero points, and the scales that fit them best.

        The scale fitted to codes q by least squares leaves the error sum(w x x) less sum(w x q) ** 2 / sum(w q q). In
        general it is less by s (2 sum(w x q) - s sum(w q q)), and where s has to be a power of two the one nearest to
        the fitted scale is best. The largest such gain wins.

        Args:
            scales: [n], in units of the usual ones.
            zeros: whole numbers [n]; None where the format has none.
        """
        match, power = fit(self.linears, rounded(self.linears, scales, self.weight_format.bits, zeros), self.shares)
        fitted = np.divide(match, power, out=np.zeros_like(match), where=power > 0)
        if self.weight_format.powers_of_two:
            fitted = powers_of_two(fitted)
        gain = fitted * (2 * match - fitted * power)
        better = gain > self._gain
        self.scales[better], self._gain[better] = fitted[better], gain[better]
        if zeros is not None:
            self.zeros[better] = zeros[better]


BlockSearch = Callable[[Candidates], None]
"""Offers scales, in units of the usual ones, and zero points."""


def search_scales(
    weights: Float32Array, weight_format: WeightFormat, inputs: InputStatistics | None, search: BlockSearch
) -> QuantizedRows:
    """Rows [N, K] in few bits, by scales and zero points that `search` offers; result as of a `Quantizer`."""
    grouped = in_blocks(weights, weight_format)
    usual, centred = default_scales(grouped, weight_format)
    flat, scales = grouped.reshape(-1, weight_format.block), usual.reshape(-1).copy()
    zeros = None if centred is None else centred.reshape(-1).copy()
    by_column = None if inputs is None else _by_column(inputs.mean_square, weights.shape[1], weight_format)
    step = max(1, _CHUNK // weight_format.block)
    for start in range(0, len(flat), step):
        part = slice(start, start + step)
        inverse = np.divide(1, scales[part], out=np.zeros_like(scales[part]), where=scales[part] != 0)
        linears = flat[part] * inverse[:, None]
        shares = None if by_column is None else by_column[np.arange(start, start + len(linears)) % len(by_column)]
        candidates = Candidates(linears, shares, weight_format)
        search(candidates)
        scales[part] *= candidates.scales
        if zeros is not None:
            zeros[part] = candidates.zeros
    found = scales.reshape(usual.shape)
    if zeros is None:
        return QuantizedRows(nearest_codes(grouped, found, weight_format.bits), found)
    points = zeros.reshape(usual.shape)
    codes = nearest_codes(grouped, found, weight_format.bits, points)
    return QuantizedRows(codes, found, zero_points=pack_zero_points(points.astype(np.uint8), weight_format.bits))


def _by_column(importance: Float32Array, columns: int, weight_format: WeightFormat) -> Float32Array:
    """Importance [K] as [blocks, block], at most 1; a block without any counts evenly."""
    if importance.shape != (columns,) or not np.isfinite(importance).all() or (importance < 0).any():
        raise InputError(f"the importance of {columns} columns must be as many finite numbers from 0 up")
    blocks: Float32Array = in_blocks(
        (importance / (importance.max(initial=0) or 1)).astype(np.float32)[None], weight_format
    )[0]
    blocks[~blocks.any(axis=1)] = 1
    return blocks


def rounded(linears: Float32Array, scales: Float32Array, bits: int, zeros: Float32Array | None = None) -> Float32Array:
    """Codes less their zero points, [n, block]; 0 where the scale is 0.

    Args:
        units: float32 [n, block].
        scales: [n].
        bits: of the codes.
        zeros: the zero points [n]; None for the middle code.
    """
    half = 1 << (bits - 1)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    codes = linears * inverse[:, None]
    if zeros is None:
        np.rint(codes, out=codes)
        np.clip(codes, -half, half - 1, out=codes)
        return codes
    # Bounds that are arrays would take three times as long as these two additions.
    codes += zeros[:, None]
    np.rint(codes, out=codes)
    np.clip(codes, 0, 2 * half - 1, out=codes)
    codes -= zeros[:, None]
    return codes


def fit(linears: Float32Array, codes: Float32Array, shares: Float32Array | None) -> tuple[Float32Array, Float32Array]:
    """sum(w x q) and sum(w q q), both [n]: their quotient is the scale that fits codes q best to weights x."""
    weighted = codes if shares is None else codes * shares
    match: Float32Array = np.einsum("nk,nk->n", linears, weighted)
    power: Float32Array = np.einsum("nk,nk->n", weighted, codes)
    return match, power
