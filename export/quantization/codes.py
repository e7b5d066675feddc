"""Weights of few bits: the operators' packing, and round-to-nearest.

A weight matrix [N, K] is divided along K into blocks. A block's scale maps its weight of largest magnitude to code 0:

    scale = extreme / -half            with half = 2 ** (bits - 1); negative when the extreme is positive
    code = round(w / scale) + half     clipped to 2 * half - 1
    w ~ (code - half) * scale

All codes are used and no zero points are stored. This is ONNX Runtime's signed full-range format (`MatMulNBits`,
`GatherBlockQuantized`). A shorter last block is padded with zeros. `k_quant` chooses other scales for the
same format.

With zero points, each block has an integer code for 0, and codes range from its smallest to its largest weight, 0
included:

    scale = (largest - smallest) / (2 ** bits - 1)
    w ~ (code - zero) * scale

The operators know 2, 4 and 8 bits. Codes of 3, 5 and 6 bits are the highest bits of codes of 4 and 8, whose lowest
bits are 0 and not stored (`stored_codes`).

Scales may also be float16 numbers (`half_precision`). They are rounded to such before codes are chosen.

Blocks of GGUF types with a minimum have an offset beside the scale, w ~ (code - half) * scale + offset. Integer zero
points cannot represent it. But what the offsets add to a product is another product: the block sums of the inputs times
the matrix of offsets [N, blocks], which is stored in the format `OFFSETS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ...errors import InputError
from ...models.manifest import WeightFormat
from ..checkpoint.source import Float32Array, QuantizedRows, UInt8Array

Float64Array = npt.NDArray[np.float64]

OFFSETS: Final = WeightFormat(8, 32)
"""Format of the matrix of a linear's offsets."""

_PACKED_BLOCK_BYTES: Final = 8
_NEGLIGIBLE: Final = np.float32(1e-30)
"""Blocks with only smaller weights are stored as zeros, since the reciprocal of their scale would overflow."""


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """Averages over the calibration tokens of the K inputs x of a linear."""

    mean_square: Float32Array
    """E[x_j ** 2], float32 [K]: the cost of an error in a column of the weights."""
    mean_magnitude: Float32Array
    """E[|x_j|], float32 [K]."""
    second_moment: Float32Array | None = None
    """E[x xT], float32 [K, K], symmetric; large, so None where no method needs it."""


def blocks_of(columns: int, weight_format: WeightFormat) -> int:
    """Number of blocks in a row of that many columns; the last one may be padded."""
    return -(-columns // weight_format.block)


def packed_row_bytes(columns: int, weight_format: WeightFormat) -> int:
    """Bytes of a row as ONNX Runtime packs it for the processor; 0 where it has no columns.

    These are the codes of every block, the last one padded, and 8 bytes for each block, its scale and its sum.
    """
    block_bytes = weight_format.block * kernel_bits(weight_format.bits) // 8 + _PACKED_BLOCK_BYTES
    return blocks_of(columns, weight_format) * block_bytes


def nearest_rows(
    weights: Float32Array,
    weight_format: WeightFormat,
    inputs: InputStatistics | None = None,  # noqa: ARG001 -- round-to-nearest does not use them
) -> QuantizedRows:
    """Round rows to nearest: scales and zero points follow from each block's extreme weights.

    The arguments are those of `methods.Quantizer`.
    """
    grouped = in_blocks(weights, weight_format)
    return rounded_rows(grouped, *default_scales(grouped, weight_format), weight_format.bits)


def default_scales(grouped: Float32Array, weight_format: WeightFormat) -> tuple[Float32Array, Float32Array | None]:
    """Scales and zero points of round-to-nearest for blocks [..., block].

    Returns:
        Scales, float32 [...]; and zero points, integers in float32 [...], or None where the format has none.
    """
    highest, lowest = grouped.max(axis=-1), grouped.min(axis=-1)
    if weight_format.zero_points:
        inverse = np.float32(1 / ((1 << weight_format.bits) - 1))
        scales = np.maximum(highest, 0) * inverse - np.minimum(lowest, 0) * inverse
        scales[scales < _NEGLIGIBLE] = 0
    else:
        extremes = np.where(highest > -lowest, highest, lowest)
        extremes[np.abs(extremes) < _NEGLIGIBLE] = 0
        scales = extremes * np.float32(-1 / (1 << (weight_format.bits - 1)))
    if weight_format.half_scales:
        scales = half_precision(scales)
    return scales, centered_zeros(grouped, scales, weight_format.bits) if weight_format.zero_points else None


def half_precision(scales: Float32Array) -> Float32Array:
    """Round scales to float16 numbers.

    Raises:
        InputError: a scale is beyond the range of float16.
    """
    largest = np.abs(scales).max(initial=0)
    if largest > np.finfo(np.float16).max:
        raise InputError(f"a scale of {largest:.3g} is beyond the range of float16", "leave --half-scales out")
    return scales.astype(np.float16).astype(np.float32)


def centered_zeros(grouped: Float32Array, scales: Float32Array, bits: int) -> Float32Array:
    """Zero points that map the middle of the range of blocks [..., block], 0 included, to the middle of the codes.

    Args:
        grouped: float32 [..., block].
        scales: float32 [...].
        bits: bits per code.

    Returns:
        Integers from 0 to 2 ** bits - 1 in float32 [...]; the middle code where the scale is 0.
    """
    last = (1 << bits) - 1
    middles = (np.maximum(grouped.max(axis=-1), 0) + np.minimum(grouped.min(axis=-1), 0)) * np.float32(0.5)
    steps = np.divide(middles, scales, out=np.zeros_like(scales), where=scales != 0)
    zeros: Float32Array = np.clip(np.floor(np.float32(last / 2 + 0.5) - steps), 0, last)
    return zeros


def in_blocks(weights: Float32Array, weight_format: WeightFormat) -> Float32Array:
    """Reshape rows [N, K] to [N, blocks, block] in C order, padding the last block with zeros."""
    rows, columns = weights.shape
    blocks = blocks_of(columns, weight_format)
    if blocks * weight_format.block != columns:
        weights = np.pad(weights, ((0, 0), (0, blocks * weight_format.block - columns)))
    # NumPy's sums depend on the memory order in their last bits, and codes must not depend on it.
    return np.ascontiguousarray(weights).reshape(rows, blocks, weight_format.block)


def rounded_rows(grouped: Float32Array, scales: Float32Array, zeros: Float32Array | None, bits: int) -> QuantizedRows:
    """Blocks [N, blocks, block] in the codes that are nearest to the weights.

    Args:
        grouped: float32 [N, blocks, block].
        scales: float32 [N, blocks].
        zeros: zero points, integers in float32 [N, blocks]; None for the middle code.
        bits: bits per code.
    """
    half = 1 << (bits - 1)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    codes = grouped * inverse[:, :, None]
    # With the added 0.5, the conversion to integer rounds to nearest.
    codes += np.float32(half + 0.5) if zeros is None else (zeros + np.float32(0.5))[:, :, None]
    np.clip(codes, 0, np.float32(2 * half - 1), out=codes)
    points = None if zeros is None else pack_zero_points(zeros.astype(np.uint8), bits)
    return QuantizedRows(pack_codes(codes.astype(np.uint8), bits), scales, zero_points=points)


def dequantized(quantized: QuantizedRows, columns: int, weight_format: WeightFormat) -> Float32Array:
    """Return the weights that a graph computes with, float32 [N, columns], with rounded offsets."""
    # Computed in place: a second copy of an embedding would take a gigabyte.
    weights: Float32Array = unpack_codes(quantized.packed, weight_format.bits).astype(np.float32)
    if quantized.zero_points is None:
        weights -= np.float32(1 << (weight_format.bits - 1))
    else:
        blocks = quantized.scales.shape[1]
        weights -= unpack_zero_points(quantized.zero_points, blocks, weight_format.bits)[:, :, None]
    weights *= quantized.scales[:, :, None]
    if quantized.offsets is not None:
        rounded = dequantized(nearest_rows(quantized.offsets, OFFSETS), quantized.offsets.shape[1], OFFSETS)
        weights += rounded[:, :, None]
    return weights.reshape(len(weights), -1)[:, :columns]


def kernel_bits(bits: int) -> int:
    """Bits of the operator's codes whose highest bits are codes of these bits."""
    return 1 << (bits - 1).bit_length()


def pack_codes(codes: UInt8Array, bits: int) -> UInt8Array:
    """Pack codes [..., block] into bytes [..., block * kernel_bits / 8], the first code in the lowest bits."""
    codes, bits = codes << np.uint8(kernel_bits(bits) - bits), kernel_bits(bits)
    codes = np.ascontiguousarray(codes)  # a view of pairs needs neighbours that are adjacent in memory
    while bits < 8:
        pairs = codes.view("<u2")  # low byte: even code, high byte: odd code
        codes = (pairs | pairs >> (8 - bits)).astype(np.uint8)
        bits *= 2
    return codes


def unpack_codes(packed: UInt8Array, bits: int) -> UInt8Array:
    """The inverse of `pack_codes`."""
    shifts = np.arange(0, 8, kernel_bits(bits), dtype=np.uint8) + np.uint8(kernel_bits(bits) - bits)
    codes: UInt8Array = packed[..., None] >> shifts & np.uint8((1 << bits) - 1)
    return codes.reshape(*packed.shape[:-1], -1)


def pack_zero_points(zeros: UInt8Array, bits: int) -> UInt8Array:
    """Pack zero points [N, blocks] into bytes [N, ceil(blocks * bits / 8)], each row like codes."""
    padding = -zeros.shape[1] % (8 // bits)
    return pack_codes(np.pad(zeros, ((0, 0), (0, padding))), bits)


def unpack_zero_points(packed: UInt8Array, blocks: int, bits: int) -> UInt8Array:
    """The inverse of `pack_zero_points`."""
    return unpack_codes(packed, bits)[:, :blocks]


def stored_codes(packed: UInt8Array, bits: int) -> UInt8Array:
    """Packed codes without the bits that are always 0, bytes [..., block * bits / 8], part after part."""
    if bits == kernel_bits(bits):
        return packed
    parts = []
    for start, shifts, mask in code_parts(bits):
        fields = (packed << start & mask).reshape(*packed.shape[:-1], -1, len(shifts))
        parts.append(np.bitwise_or.reduce(fields >> shifts, axis=-1))
    return np.concatenate(parts, axis=-1)


def code_parts(bits: int) -> list[tuple[int, UInt8Array, np.uint8]]:
    """How stored codes become packed ones: for the higher half of their bits and for the others,

    - where these bits begin in the operator's codes, counted from the highest one;
    - by how much a stored byte is shifted to the left so that they are the highest bits of the next packed byte;
    - the mask of these bits.
    """
    kernel, half, found = kernel_bits(bits), kernel_bits(bits) // 2, []
    for start, width in ((0, half), (half, bits - half)):
        mask = ((1 << width) - 1 << kernel - width) * 255 // ((1 << kernel) - 1)  # of every code in a byte
        found.append((start, np.arange(0, kernel, width, dtype=np.uint8), np.uint8(mask)))
    return found


StatisticsOf = Callable[[str], InputStatistics | None]
"""Returns the statistics of a linear's inputs; None where there are none."""


def second_moments(inputs: InputStatistics, columns: int) -> Float32Array:
    """E[x xT] of the inputs of a linear, float32 [K, K]; inputs count as uncorrelated where it is unknown.

    Raises:
        InputError: the moments are not finite numbers of that shape.
    """
    moments = np.diag(inputs.mean_square) if inputs.second_moment is None else inputs.second_moment
    if moments.shape != (columns, columns) or not np.isfinite(moments).all():
        raise InputError(f"the second moments of {columns} inputs must be {columns} x {columns} finite numbers")
    return moments
