"""Weights of 2, 4 and 8 bits: rounding to nearest, and the operators' packing.

A weight matrix [N, K] is cut along K into blocks. A block's scale puts its weight of largest magnitude on code 0:

    scale = extreme / -half            with half = 2 ** (bits - 1); negative when the extreme is positive
    code = round(w / scale) + half     clipped to 2 * half - 1
    w ~ (code - half) * scale

All codes are used and no zero points are stored. This is ONNX Runtime's signed full-range form (`MatMulNBits`,
`GatherBlockQuantized`). A tail block shorter than the rest is padded with zeros. Other methods (`k_quant`, `hqq`)
choose other scales for the same form.

With zero points each block says which code stands for 0, a whole number, and codes run from its least weight to its
greatest, 0 included:

    scale = (greatest - least) / (2 ** bits - 1)
    w ~ (code - zero) * scale

Scales may also be powers of two, perhaps negative (`powers_of_two`). They are made so before codes are chosen.

Blocks that come with a minimum of their own have an offset beside the scale, w ~ (code - half) * scale + offset. Zero
points, which are whole codes, cannot say that; but what the offsets add to a product is another product, of the sums of
the inputs block by block with the matrix of the offsets, [N, blocks]. That one is kept in `OFFSETS`.

Weights with a rank are those of their codes and the product of two thin matrices besides (`qera`), which are rounded to
nearest in their turn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from ...models.manifest import WeightFormat
from ..checkpoint.source import LowRankFactors, QuantizedRows

Float32Array = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]

OFFSETS: Final = WeightFormat(8, 32)
"""How the matrix of a unit's offsets is stored in its turn."""
_FACTORS: Final = WeightFormat(8, 32)

_NEGLIGIBLE: Final = np.float32(1e-30)
"""A block whose largest weight is smaller is stored as zeros: the reciprocal of its scale would overflow."""
_TURN: Final = {2: 0.75, 4: 0.75, 8: 0.5}
"""By bits, which power of two stands for a usual scale (see `powers_of_two`). The one below cuts the largest weights
off, the one above makes steps wider; of 8 bits, whose steps are narrow, cutting off costs fifty times as much."""


def blocks_of(columns: int, weight_format: WeightFormat) -> int:
    """Blocks in a row of that many columns, the last one perhaps padded."""
    return -(-columns // weight_format.block)


def factor_format(weight_format: WeightFormat) -> WeightFormat:
    """How the two thin matrices are stored that repair weights of that format."""
    return replace(_FACTORS, powers_of_two=weight_format.powers_of_two)


def quantize_rows(weights: Float32Array, weight_format: WeightFormat) -> tuple[UInt8Array, Float32Array]:
    """Round rows to the nearest codes.

    Args:
        weights: float32 [N, K], finite.
        weight_format: 2, 4 or 8 bits and the block; without zero points.

    Returns:
        Packed codes, uint8 [N, blocks, block * bits / 8], and scales, float32 [N, blocks].
    """
    grouped = in_blocks(weights, weight_format)
    scales, _ = default_scales(grouped, weight_format)
    return nearest_codes(grouped, scales, weight_format.bits), scales


def default_scales(grouped: Float32Array, weight_format: WeightFormat) -> tuple[Float32Array, Float32Array | None]:
    """The scales that rounding to nearest takes for blocks [..., block], and their zero points where they have any.

    Returns:
        Scales, float32 [...]; and the codes that stand for 0, whole numbers in float32 [...], or None.
    """
    if weight_format.zero_points:
        scales = _steps(grouped, (1 << weight_format.bits) - 1)
    else:
        scales = extremes(grouped) * np.float32(-1 / (1 << (weight_format.bits - 1)))
    if weight_format.powers_of_two:
        scales = powers_of_two(scales, _TURN[weight_format.bits])
    return scales, centred_zeros(grouped, scales, weight_format.bits) if weight_format.zero_points else None


def powers_of_two(scales: Float32Array, turn: float = 0.75) -> Float32Array:
    """A power of two for each number, with its sign; 0 stays 0.

    `turn`, as a share of the power of two above, is what a number has to exceed to take that one: with 0.75 it is the
    nearer one, with 0.5 always the one above.
    """
    fraction, exponent = np.frexp(scales)
    upper = np.abs(fraction) > np.float32(turn)
    nearest: Float32Array = np.copysign(np.ldexp(np.float32(0.5), exponent + upper), scales)
    nearest[scales == 0] = 0
    return nearest


def _steps(grouped: Float32Array, steps: int) -> Float32Array:
    """From the least to the greatest number on the last axis, 0 included, in so many steps; 0 where negligible."""
    share = np.float32(1 / steps)
    size: Float32Array = np.maximum(grouped.max(axis=-1), 0) * share - np.minimum(grouped.min(axis=-1), 0) * share
    size[size < _NEGLIGIBLE] = 0
    return size


def centred_zeros(grouped: Float32Array, scales: Float32Array, bits: int) -> Float32Array:
    """The zero points that put the middle of what blocks [..., block] span, 0 included, on the middle of the codes.

    Args:
        grouped: float32 [..., block].
        scales: float32 [...].
        bits: of the codes.

    Returns:
        Whole numbers from 0 to 2 ** bits - 1 in float32 [...]; the middle code where the scale is 0.
    """
    last = (1 << bits) - 1
    middles = (np.maximum(grouped.max(axis=-1), 0) + np.minimum(grouped.min(axis=-1), 0)) * np.float32(0.5)
    steps = np.divide(middles, scales, out=np.zeros_like(scales), where=scales != 0)
    zeros: Float32Array = np.clip(np.floor(np.float32(last / 2 + 0.5) - steps), 0, last)
    return zeros


def in_blocks(weights: Float32Array, weight_format: WeightFormat) -> Float32Array:
    """Rows [N, K] as [N, blocks, block], the last block perhaps padded with zeros."""
    rows, columns = weights.shape
    blocks = blocks_of(columns, weight_format)
    if blocks * weight_format.block != columns:
        weights = np.pad(weights, ((0, 0), (0, blocks * weight_format.block - columns)))
    return weights.reshape(rows, blocks, weight_format.block)


def extremes(grouped: Float32Array) -> Float32Array:
    """The number of largest magnitude on the last axis, with its sign; 0 where that is negligible."""
    highest, lowest = grouped.max(axis=-1), grouped.min(axis=-1)
    extreme: Float32Array = np.where(highest > -lowest, highest, lowest)
    extreme[np.abs(extreme) < _NEGLIGIBLE] = 0
    return extreme


def nearest_codes(
    grouped: Float32Array, scales: Float32Array, bits: int, zeros: Float32Array | None = None
) -> UInt8Array:
    """Packed codes of blocks [N, blocks, block], each the nearest to its weight.

    Args:
        grouped: float32 [N, blocks, block].
        scales: float32 [N, blocks].
        bits: of the codes.
        zeros: the codes that stand for 0, whole numbers in float32 [N, blocks]; None for the middle code.
    """
    half = 1 << (bits - 1)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    codes = grouped * inverse[:, :, None]
    # Truncation to integer then rounds to nearest.
    codes += np.float32(half + 0.5) if zeros is None else (zeros + np.float32(0.5))[:, :, None]
    np.clip(codes, 0, np.float32(2 * half - 1), out=codes)
    return pack_codes(codes.astype(np.uint8), bits)


def dequantize_rows(
    packed: UInt8Array,
    scales: Float32Array,
    columns: int,
    weight_format: WeightFormat,
    offsets: Float32Array | None = None,
    zero_points: UInt8Array | None = None,
) -> Float32Array:
    """The weights that packed codes stand for, float32 [N, columns]; the inverse of `quantize_rows` up to rounding.

    Offsets and zero points are those of a `QuantizedRows`.
    """
    # Changed in place: of an embedding a second copy would be a gigabyte.
    weights: Float32Array = unpack_codes(packed, weight_format.bits).astype(np.float32)
    if zero_points is None:
        weights -= np.float32(1 << (weight_format.bits - 1))
    else:
        weights -= unpack_zero_points(zero_points, scales.shape[1], weight_format.bits)[:, :, None]
    weights *= scales[:, :, None]
    if offsets is not None:
        weights += offsets[:, :, None]
    return weights.reshape(len(packed), -1)[:, :columns]


def dequantized(quantized: QuantizedRows, columns: int, weight_format: WeightFormat) -> Float32Array:
    """The weights a graph computes with, float32 [N, columns]; offsets and factors are taken as once stored."""
    offsets = None if quantized.offsets is None else rounded_offsets(quantized.offsets)
    weights = dequantize_rows(
        quantized.packed, quantized.scales, columns, weight_format, offsets, quantized.zero_points
    )
    return (
        weights if quantized.factors is None else weights + low_rank_product(quantized.factors, columns, weight_format)
    )


def low_rank_product(factors: LowRankFactors, columns: int, weight_format: WeightFormat) -> Float32Array:
    """What factors add to weights of that format, float32 [N, columns]."""
    stored = factor_format(weight_format)
    up = dequantize_rows(factors.up_codes, factors.up_scales, weight_format.rank, stored)
    product: Float32Array = up @ dequantize_rows(factors.down_codes, factors.down_scales, columns, stored)
    return product


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


def pack_zero_points(zeros: UInt8Array, bits: int) -> UInt8Array:
    """Zero points [N, blocks] to bytes [N, ceil(blocks * bits / 8)], packed like codes, a row at a time."""
    spare = -zeros.shape[1] % (8 // bits)
    return pack_codes(np.pad(zeros, ((0, 0), (0, spare))), bits)


def unpack_zero_points(packed: UInt8Array, blocks: int, bits: int) -> UInt8Array:
    """The inverse of `pack_zero_points`."""
    return unpack_codes(packed, bits)[:, :blocks]
