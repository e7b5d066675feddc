"""What the methods share that look for the scale of each block: `k_quant` and `hqq`.

They work on weights in units of the scale that rounding to nearest would take, so that no magnitude overflows and a
scale of 1 is where the search begins. Codes are then the nearest ones: for a given scale nothing has less error,
whatever the importance of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from ...edge.errors import InputError
from ...models.manifest import WeightFormat
from ..source import Coded
from .codes import Float32Array, extremes, in_blocks, nearest_codes

_CHUNK: Final = 1 << 16
"""Weights worked on at a time: a handful of arrays of as many stay in a core's cache."""

BlockSearch = Callable[[Float32Array, Float32Array | None, int], Float32Array]
"""Scales [n] of blocks [n, block] in units of their usual scales, given the importance of their weights [n, block], or
None where all count the same, and the bits."""


def search_scales(
    weights: Float32Array, form: WeightFormat, importance: Float32Array | None, search: BlockSearch
) -> Coded:
    """Rows [N, K] in few bits, by scales that `search` finds; result as of a `Quantizer`."""
    grouped = in_blocks(weights, form)
    usual = extremes(grouped) * np.float32(-1 / (1 << (form.bits - 1)))
    flat, scales = grouped.reshape(-1, form.block), usual.reshape(-1).copy()
    by_column = None if importance is None else _by_column(importance, weights.shape[1], form)
    step = max(1, _CHUNK // form.block)
    for start in range(0, len(flat), step):
        part = slice(start, start + step)
        inverse = np.divide(1, scales[part], out=np.zeros_like(scales[part]), where=scales[part] != 0)
        units = flat[part] * inverse[:, None]
        shares = None if by_column is None else by_column[np.arange(start, start + len(units)) % len(by_column)]
        scales[part] *= search(units, shares, form.bits)
    found = scales.reshape(usual.shape)
    return Coded(nearest_codes(grouped, found, form.bits), found)


def _by_column(importance: Float32Array, columns: int, form: WeightFormat) -> Float32Array:
    """Importance [K] as [blocks, block], at most 1; a block without any counts evenly."""
    if importance.shape != (columns,) or not np.isfinite(importance).all() or (importance < 0).any():
        raise InputError(f"the importance of {columns} columns must be as many finite numbers from 0 up")
    blocks: Float32Array = in_blocks((importance / (importance.max(initial=0) or 1)).astype(np.float32)[None], form)[0]
    blocks[~blocks.any(axis=1)] = 1
    return blocks


def rounded(units: Float32Array, scales: Float32Array, bits: int) -> Float32Array:
    """Signed codes [n, block] of blocks for given scales [n]; 0 where the scale is 0."""
    half = 1 << (bits - 1)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    codes = units * inverse[:, None]
    np.rint(codes, out=codes)
    np.clip(codes, -half, half - 1, out=codes)
    return codes


def fit(units: Float32Array, codes: Float32Array, shares: Float32Array | None) -> tuple[Float32Array, Float32Array]:
    """sum(w x q) and sum(w q q), both [n]: their quotient is the scale that fits codes q best to weights x."""
    weighted = codes if shares is None else codes * shares
    match: Float32Array = np.einsum("nk,nk->n", units, weighted)
    power: Float32Array = np.einsum("nk,nk->n", weighted, codes)
    return match, power


class BestFit:
    """The scales with the least squared error, weighted by importance, among those offered."""

    def __init__(self, units: Float32Array, shares: Float32Array | None) -> None:
        self.scales: Float32Array = np.zeros(len(units), np.float32)
        self._units = units
        self._shares = shares
        self._gain = np.zeros(len(units), np.float32)

    def offer(self, codes: Float32Array) -> None:
        """Consider the scales that fit these codes best, by least squares.

        The error is then sum(w x x) less sum(w x q) ** 2 / sum(w q q), so the largest of the latter wins.
        """
        match, power = fit(self._units, codes, self._shares)
        fitted = np.divide(match, power, out=np.zeros_like(match), where=power > 0)
        gain = match * fitted
        better = gain > self._gain
        self.scales[better], self._gain[better] = fitted[better], gain[better]
