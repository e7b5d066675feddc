"""Quantizing weights that have been quantized before.

Rounding to 4 bits once more costs about as much as the first rounding. So the scale of a block is not derived from its
extreme weight, but chosen among a few candidates by squared error and fitted to the codes by least squares, which
reduces the error on Q4_K by an eighth. 8 bits are accurate enough without it.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ...models.manifest import WeightFormat
from ..checkpoint.source import Float32Array, UInt8Array
from ..quantization.codes import blocks_of, pack_codes, quantize_rows

_SCALE_FACTORS: Final = (1.0, 0.9, 1.1)
"""Candidate scales, relative to the one that puts the extreme weight on the outermost code."""
_NEGLIGIBLE: Final = np.float32(1e-30)


def requantize_rows(weights: Float32Array, weight_format: WeightFormat) -> tuple[UInt8Array, Float32Array]:
    """Quantize rows like `quantize_rows`, with less error.

    Args:
        weights: float32 [N, K], finite.
        weight_format: 4 or 8 bits, and the block size.

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
    for factor in _SCALE_FACTORS:
        candidate_codes, scale, error = _rounded(grouped, extreme * np.float32(-factor / 8))
        better = error < least
        codes[better], scales[better], least[better] = candidate_codes[better], scale[better], error[better]
    shifted = (codes + 8).astype(np.uint8).reshape(rows, blocks, weight_format.block)
    return pack_codes(shifted, weight_format.bits), scales.reshape(rows, blocks)


def _rounded(grouped: Float32Array, scales: Float32Array) -> tuple[Float32Array, Float32Array, Float32Array]:
    """Round blocks [n, block] at scales [n]; returns codes -8 to 7, the best-fitting scales and the squared errors."""
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    codes = np.clip(np.rint(grouped * inverse[:, None]), -8, 7)
    power, match = np.einsum("nk,nk->n", codes, codes), np.einsum("nk,nk->n", codes, grouped)
    fitted = np.divide(match, power, out=np.zeros_like(match), where=power != 0)
    residual = grouped - codes * fitted[:, None]
    return codes, fitted, np.einsum("nk,nk->n", residual, residual)
