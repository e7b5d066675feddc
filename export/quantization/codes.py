"""Weights of 2, 4 and 8 bits: rounding to nearest, and the operators' packing.

A weight matrix [N, K] is cut along K into blocks. A block's scale puts its weight of largest magnitude on code 0:

    scale = extreme / -half            with half = 2 ** (bits - 1); negative when the extreme is positive
    code = round(w / scale) + half     clipped to 2 * half - 1
    w ~ (code - half) * scale

All codes are used and no zero points are stored. This is ONNX Runtime's signed full-range form (`MatMulNBits`,
`GatherBlockQuantized`). A tail block shorter than the rest is padded with zeros. Other methods (`k_quant`, `hqq`)
choose other scales for the same form.

Blocks that come with a minimum of their own have an offset beside the scale, w ~ (code - half) * scale + offset. Zero
points, which are whole codes, cannot say that; but what the offsets add to a product is another product, of the sums of
the inputs block by block with the matrix of the offsets, [N, blocks]. That one is kept in `OFFSETS`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ...models.manifest import WeightFormat

Float32Array = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]

OFFSETS: Final = WeightFormat(8, 32)
"""How the matrix of a unit's offsets is stored in its turn."""

_NEGLIGIBLE: Final = np.float32(1e-30)
"""A block whose largest weight is smaller is stored as zeros: the reciprocal of its scale would overflow."""


def blocks_of(columns: int, form: WeightFormat) -> int:
    """Blocks in a row of that many columns, the last one perhaps padded."""
    return -(-columns // form.block)


def quantize_rows(weights: Float32Array, form: WeightFormat) -> tuple[UInt8Array, Float32Array]:
    """Round rows to the nearest codes.

    Args:
        weights: float32 [N, K], finite.
        form: 2, 4 or 8 bits and the block.

    Returns:
        Packed codes, uint8 [N, blocks, block * bits / 8], and scales, float32 [N, blocks].
    """
    grouped = in_blocks(weights, form)
    scales = extremes(grouped) * np.float32(-1 / (1 << (form.bits - 1)))
    return nearest_codes(grouped, scales, form.bits), scales


def in_blocks(weights: Float32Array, form: WeightFormat) -> Float32Array:
    """Rows [N, K] as [N, blocks, block], the last block perhaps padded with zeros."""
    rows, columns = weights.shape
    blocks = blocks_of(columns, form)
    if blocks * form.block != columns:
        weights = np.pad(weights, ((0, 0), (0, blocks * form.block - columns)))
    return weights.reshape(rows, blocks, form.block)


def extremes(grouped: Float32Array) -> Float32Array:
    """The number of largest magnitude on the last axis, with its sign; 0 where that is negligible."""
    highest, lowest = grouped.max(axis=-1), grouped.min(axis=-1)
    extreme: Float32Array = np.where(highest > -lowest, highest, lowest)
    extreme[np.abs(extreme) < _NEGLIGIBLE] = 0
    return extreme


def nearest_codes(grouped: Float32Array, scales: Float32Array, bits: int) -> UInt8Array:
    """Packed codes of blocks [N, blocks, block] for given scales [N, blocks], each the nearest to its weight."""
    half = 1 << (bits - 1)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    codes = grouped * inverse[:, :, None]
    codes += np.float32(half + 0.5)  # truncation to integer then rounds to nearest
    np.clip(codes, 0, np.float32(2 * half - 1), out=codes)
    return pack_codes(codes.astype(np.uint8), bits)


def dequantize_rows(
    packed: UInt8Array, scales: Float32Array, columns: int, form: WeightFormat, offsets: Float32Array | None = None
) -> Float32Array:
    """The weights that packed codes stand for, float32 [N, columns]; the inverse of `quantize_rows` up to rounding."""
    codes = unpack_codes(packed, form.bits).astype(np.float32)
    weights: Float32Array = (codes - np.float32(1 << (form.bits - 1))) * scales[:, :, None]
    if offsets is not None:
        weights += offsets[:, :, None]
    return weights.reshape(len(packed), -1)[:, :columns]


def rounded_offsets(offsets: Float32Array) -> Float32Array:
    """Offsets [N, blocks] as they are once stored."""
    return dequantize_rows(*quantize_rows(offsets, OFFSETS), offsets.shape[1], OFFSETS)


def pack_codes(codes: UInt8Array, bits: int) -> UInt8Array:
    """Codes [..., block] to bytes [..., block * bits / 8], the first code in the lowest bits."""
    while bits < 8:
        pairs = codes.view("<u2")  # low byte: even code, high byte: odd code
        codes = (pairs | pairs >> (8 - bits)).astype(np.uint8)
        bits *= 2
    return codes


def unpack_codes(packed: UInt8Array, bits: int) -> UInt8Array:
    """The inverse of `pack_codes`."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes: UInt8Array = packed[..., None] >> shifts & np.uint8((1 << bits) - 1)
    return codes.reshape(*packed.shape[:-1], -1)
