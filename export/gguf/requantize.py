"""Weights that were rounded before, rounded once more.

Four bits anew cost about as much again as the first rounding did, so here a block's scale is not read off its extreme
weight but chosen among a few by the squared error, and fitted to the codes by least squares: on Q4_K this takes an
eighth off the error. Eight bits need no such care.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ...models.manifest import WeightFormat
from ..checkpoint.source import Float32Array, UInt8Array
from ..quantization.codes import blocks_of, pack_codes, quantize_rows

_STRETCHES: Final = (1.0, 0.9, 1.1)
"""Tried scales, in units of the one that puts the extreme weight on the outermost code."""
_NEGLIGIBLE: Final = np.float32(1e-30)


def requantize_rows(weights: Float32Array, weight_format: WeightFormat) -> tuple[UInt8Array, Float32Array]:
    """Round rows to codes, with less error than `quantize_rows` and the same result type.

    Args:
        weights: float32 [N, K], finite.
        weight_format: 4 or 8 bits and the block.

    Returns:
        Packed codes, uint8 [N, blocks, block * bits / 8], and scales, float32 [N, blocks].
    """
    if weight_format.bits != 4:
        return quantize_rows(weights, weight_format)
    rows, columns = weights.shape
    blocks = blocks_of(columns, weight_format)
    if blocks * weight_format.block != columns:
        weights = np.pad(weights, ((0, 0), (0, blocks * weight_format.block - columns)))
    grouped = weights.reshape(-1, weight_format.block)
    highest, lowest = grouped.max(axis=1), grouped.min(axis=1)
    extreme = np.where(highest > -lowest, highest, lowest)
    extreme[np.abs(extreme) < _NEGLIGIBLE] = 0
    codes, scales = np.zeros(grouped.shape, np.int8), np.zeros(len(grouped), np.float32)
    least = np.full(len(grouped), np.inf, np.float32)
    for stretch in _STRETCHES:
        tried, scale, error = _rounded(grouped, extreme * np.float32(-stretch / 8))
        better = error < least
        codes[better], scales[better], least[better] = tried[better], scale[better], error[better]
    shifted = (codes + 8).astype(np.uint8).reshape(rows, blocks, weight_format.block)
    return pack_codes(shifted, weight_format.bits), scales.reshape(rows, blocks)


def _rounded(grouped: Float32Array, scales: Float32Array) -> tuple[Float32Array, Float32Array, Float32Array]:
    """Codes -8 to 7 of blocks [n, block] for given scales [n], the scales that then fit best, and the squared error."""
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    codes = np.clip(np.rint(grouped * inverse[:, None]), -8, 7)
    power, match = np.einsum("nk,nk->n", codes, codes), np.einsum("nk,nk->n", codes, grouped)
    fitted = np.divide(match, power, out=np.zeros_like(match), where=power != 0)
    left = grouped - codes * fitted[:, None]
    return codes, fitted, np.einsum("nk,nk->n", left, left)
