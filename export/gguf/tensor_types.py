"""The tensor types of GGUF: decoding them, or taking over their codes.

Q4_0, Q5_0 and Q8_0 store blocks of 32 weights as `w = d * q` with one float16 d and a signed q of 4, 5 or 8 bits. This
is the format of `quantization.codes`, w = (code - half) * scale: the codes are shifted, the scale is widened to
float32, and nothing is rounded. Q4_1 and Q4_K also have a minimum, w = d * q + m, which becomes the offset
m + half * d: codes and scales are exact, and offsets are stored in 8 bits. All other types are decoded by the `gguf`
package and, where codes are needed, quantized anew.

Rounding to 4 bits once more costs about as much as the first rounding. So k-quant chooses the scales by squared error,
which reduces the error on Q4_K by an eighth. 8 bits are accurate enough without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ...models.manifest import WeightFormat
from ..checkpoint.source import Float32Array, QuantizedRows, UInt8Array
from ..quantization.codes import pack_codes

_FP32: Final = WeightFormat(32)
_INT8: Final = WeightFormat(8, 32)
_INT4: Final = WeightFormat(4, 32)
_INT4_OFFSETS: Final = WeightFormat(4, 32, offsets=True)
_SCALE_BLOCK: Final = 32
"""Number of weights that share a scale."""


UnpackedBlocks = tuple[npt.NDArray[np.int16], Float32Array, Float32Array | None]
"""Unpacked blocks, w = code * scale + offset: signed codes [blocks, 32], scales [blocks] and, where a type has them,
offsets [blocks]."""


@dataclass(frozen=True)
class TensorType:
    """A tensor type of ggml."""

    name: str
    number: int
    """The type's number in the file and in the `gguf` package."""
    block_weights: int
    """Weights per block; a block does not cross rows."""
    block_bytes: int
    """Bytes per block."""
    nearest_format: WeightFormat
    """The operators' weight format that is nearest to this type."""
    unpack: Callable[[UInt8Array], UnpackedBlocks] | None = None
    """Unpacks raw blocks [blocks, bytes] exactly; None where the operators have no equivalent."""
    code_bits: int = 0
    """Bits per unpacked code."""

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of that many weights."""
        return columns // self.block_weights * self.block_bytes

    def decode(self, raw: UInt8Array) -> Float32Array:
        """Decode raw rows [rows, row bytes] to weights, float32 [rows, columns]."""
        from gguf import GGMLQuantizationType  # noqa: PLC0415 -- an extra, imported when used
        from gguf.quants import dequantize  # noqa: PLC0415

        with np.errstate(all="ignore"):  # callers check the result for NaN and infinity
            return np.asarray(dequantize(raw, GGMLQuantizationType(self.number)), np.float32)

    def codes(self, raw: UInt8Array, weight_format: WeightFormat) -> QuantizedRows | None:
        """Convert raw rows to `weight_format`; None where their codes cannot be taken over."""
        if self.unpack is None or weight_format.block != _SCALE_BLOCK or weight_format.bits < self.code_bits:
            return None
        with np.errstate(all="ignore"):  # as in `decode`
            codes, scales, offsets = self.unpack(raw.reshape(-1, self.block_bytes))
        if offsets is not None and not weight_format.offsets:
            return None
        shifted = (codes + (1 << (weight_format.bits - 1))).astype(np.uint8).reshape(len(raw), -1, _SCALE_BLOCK)
        offsets = None if offsets is None else offsets.reshape(len(raw), -1)
        return QuantizedRows(pack_codes(shifted, weight_format.bits), scales.reshape(len(raw), -1), offsets)


def _halves(blocks: UInt8Array, offset: int = 0) -> Float32Array:
    """Read the float16 at a byte offset of each block, as float32."""
    halves: Float32Array = blocks[:, offset : offset + 2].copy().view("<f2")[:, 0].astype(np.float32)
    return halves


def _nibbles(packed: UInt8Array) -> npt.NDArray[np.int16]:
    """Unpack sixteen bytes to 32 codes: first all low nibbles, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.int16)


def _unpack_q4_0(blocks: UInt8Array) -> UnpackedBlocks:
    return _nibbles(blocks[:, 2:]) - 8, _halves(blocks), None


def _unpack_q4_1(blocks: UInt8Array) -> UnpackedBlocks:
    scales = _halves(blocks)
    return _nibbles(blocks[:, 4:]) - 8, scales, _halves(blocks, 2) + 8 * scales


def _unpack_q5_0(blocks: UInt8Array) -> UnpackedBlocks:
    fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little").astype(np.int16)
    return (_nibbles(blocks[:, 6:]) | fifth << 4) - 16, _halves(blocks), None


def _unpack_q8_0(blocks: UInt8Array) -> UnpackedBlocks:
    return blocks[:, 2:].view(np.int8).astype(np.int16), _halves(blocks), None


def _unpack_q4_k(blocks: UInt8Array) -> UnpackedBlocks:
    """Unpack eight blocks of 32 from each block of 256, whose 6-bit scales and minima are spread over twelve bytes."""
    low, high, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    steps = np.concatenate([low & 63, (mixed & 15) | (low >> 2 & 48)], axis=1)
    minima = np.concatenate([high & 63, (mixed >> 4) | (high >> 2 & 48)], axis=1)
    scales = _halves(blocks)[:, None] * steps.astype(np.float32)
    offsets = 8 * scales - _halves(blocks, 2)[:, None] * minima.astype(np.float32)
    codes = np.stack([blocks[:, 16:].reshape(-1, 4, 32) & 15, blocks[:, 16:].reshape(-1, 4, 32) >> 4], axis=2)
    return codes.reshape(-1, 32).astype(np.int16) - 8, scales.reshape(-1), offsets.reshape(-1)


TENSOR_TYPES: Final = {
    each.number: each
    for each in (
        TensorType("F32", 0, 1, 4, _FP32),
        TensorType("F16", 1, 1, 2, _FP32),
        TensorType("BF16", 30, 1, 2, _FP32),
        TensorType("Q4_0", 2, 32, 18, _INT4, _unpack_q4_0, 4),
        TensorType("Q4_1", 3, 32, 20, _INT4_OFFSETS, _unpack_q4_1, 4),
        TensorType("Q5_0", 6, 32, 22, _INT8, _unpack_q5_0, 5),
        TensorType("Q5_1", 7, 32, 24, _INT8),
        TensorType("Q8_0", 8, 32, 34, _INT8, _unpack_q8_0, 8),
        TensorType("Q4_K", 12, 256, 144, _INT4_OFFSETS, _unpack_q4_k, 4),
        TensorType("Q5_K", 13, 256, 176, _INT8),
        TensorType("Q6_K", 14, 256, 210, _INT8),
    )
}
"""The supported types by number."""


def type_name(number: int) -> str:
    """Return the name of a type for a message, also of an unsupported one."""
    from gguf import GGMLQuantizationType  # noqa: PLC0415 -- an extra, imported when used

    known = {int(member): str(member.name) for member in GGMLQuantizationType}
    return known.get(number, f"number {number}")
