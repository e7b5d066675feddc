"""The types a GGUF tensor may have: decoding their blocks, and carrying codes over where the operators have them too.

Q4_0, Q5_0 and Q8_0 store blocks of 32 weights as `w = d * q` with one float16 d and a signed q of 4, 5 or 8 bits. That
is the form of `quantization.codes`, w = (code - half) * scale: the codes are moved, the scale is widened to float32,
and nothing is rounded. Q4_1 and Q4_K have a minimum beside the scale, w = d * q + m, which becomes the offset
m + half * d: codes and scales are exact, and offsets are kept in 8 bits. All other types are decoded by the `gguf`
package and, where codes are asked for, rounded anew.
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


@dataclass(frozen=True)
class SplitBlocks:
    """Blocks taken apart: w = code * scale + offset."""

    codes: npt.NDArray[np.int16]
    """Signed, [blocks, 32]."""
    scales: Float32Array
    """[blocks]."""
    offsets: Float32Array | None = None
    """[blocks]."""


_FP32: Final = WeightFormat(32)
_INT8: Final = WeightFormat(8, 32)
_INT4: Final = WeightFormat(4, 32)
_INT4_OFFSETS: Final = WeightFormat(4, 32, offsets=True)
_SCALED: Final = 32
"""Weights that share a scale."""


@dataclass(frozen=True)
class TensorType:
    """One of ggml's types."""

    name: str
    number: int
    """In the file, and in the `gguf` package."""
    weights: int
    """In a block; blocks do not cross rows."""
    bytes: int
    """Of a block."""
    nearest: WeightFormat
    """The operators' format that comes nearest."""
    split: Callable[[UInt8Array], SplitBlocks] | None = None
    """Takes raw blocks [blocks, bytes] apart, exactly; None where the operators have no such form."""
    split_bits: int = 0
    """Bits such a code needs."""

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of that many weights."""
        return columns // self.weights * self.bytes

    def decode(self, raw: UInt8Array) -> Float32Array:
        """Weights of raw rows [rows, row bytes], float32 [rows, columns]."""
        from gguf import GGMLQuantizationType  # noqa: PLC0415 -- an extra, imported when used
        from gguf.quants import dequantize  # noqa: PLC0415

        with np.errstate(all="ignore"):  # damaged scales are found in the result
            return np.asarray(dequantize(raw, GGMLQuantizationType(self.number)), np.float32)

    def codes(self, raw: UInt8Array, weight_format: WeightFormat) -> QuantizedRows | None:
        """Raw rows as `weight_format` has them; None where their codes cannot be carried over."""
        if self.split is None or weight_format.block != _SCALED or weight_format.bits < self.split_bits:
            return None
        with np.errstate(all="ignore"):  # as above
            split = self.split(raw.reshape(-1, self.bytes))
        if split.offsets is not None and not weight_format.offsets:
            return None
        codes = (split.codes + (1 << (weight_format.bits - 1))).astype(np.uint8).reshape(len(raw), -1, _SCALED)
        offsets = None if split.offsets is None else split.offsets.reshape(len(raw), -1)
        return QuantizedRows(pack_codes(codes, weight_format.bits), split.scales.reshape(len(raw), -1), offsets)


def _halves(blocks: UInt8Array, place: int = 0) -> Float32Array:
    """The float16 at a place of each block."""
    halves: Float32Array = blocks[:, place : place + 2].copy().view("<f2")[:, 0].astype(np.float32)
    return halves


def _nibbles(packed: UInt8Array) -> npt.NDArray[np.int16]:
    """Sixteen bytes to 32 codes: all low halves, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.int16)


def _split_q4_0(blocks: UInt8Array) -> SplitBlocks:
    return SplitBlocks(_nibbles(blocks[:, 2:]) - 8, _halves(blocks))


def _split_q4_1(blocks: UInt8Array) -> SplitBlocks:
    scales = _halves(blocks)
    return SplitBlocks(_nibbles(blocks[:, 4:]) - 8, scales, _halves(blocks, 2) + 8 * scales)


def _split_q5_0(blocks: UInt8Array) -> SplitBlocks:
    fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little").astype(np.int16)
    return SplitBlocks((_nibbles(blocks[:, 6:]) | fifth << 4) - 16, _halves(blocks))


def _split_q8_0(blocks: UInt8Array) -> SplitBlocks:
    return SplitBlocks(blocks[:, 2:].view(np.int8).astype(np.int16), _halves(blocks))


def _split_q4_k(blocks: UInt8Array) -> SplitBlocks:
    """Eight blocks of 32 to a block of 256, their scales and minima in 6 bits each, spread over twelve bytes."""
    low, high, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    steps = np.concatenate([low & 63, (mixed & 15) | (low >> 2 & 48)], axis=1)
    minima = np.concatenate([high & 63, (mixed >> 4) | (high >> 2 & 48)], axis=1)
    scales = _halves(blocks)[:, None] * steps.astype(np.float32)
    offsets = 8 * scales - _halves(blocks, 2)[:, None] * minima.astype(np.float32)
    codes = np.stack([blocks[:, 16:].reshape(-1, 4, 32) & 15, blocks[:, 16:].reshape(-1, 4, 32) >> 4], axis=2)
    return SplitBlocks(codes.reshape(-1, 32).astype(np.int16) - 8, scales.reshape(-1), offsets.reshape(-1))


TYPES: Final = {
    kind.number: kind
    for kind in (
        TensorType("F32", 0, 1, 4, _FP32),
        TensorType("F16", 1, 1, 2, _FP32),
        TensorType("BF16", 30, 1, 2, _FP32),
        TensorType("Q4_0", 2, 32, 18, _INT4, _split_q4_0, 4),
        TensorType("Q4_1", 3, 32, 20, _INT4_OFFSETS, _split_q4_1, 4),
        TensorType("Q5_0", 6, 32, 22, _INT8, _split_q5_0, 5),
        TensorType("Q5_1", 7, 32, 24, _INT8),
        TensorType("Q8_0", 8, 32, 34, _INT8, _split_q8_0, 8),
        TensorType("Q4_K", 12, 256, 144, _INT4_OFFSETS, _split_q4_k, 4),
        TensorType("Q5_K", 13, 256, 176, _INT8),
        TensorType("Q6_K", 14, 256, 210, _INT8),
    )
}
"""The types that can be read, by number."""


def type_name(number: int) -> str:
    """A type's name for a message, also of one that cannot be read."""
    from gguf import GGMLQuantizationType  # noqa: PLC0415 -- an extra, imported when used

    known = {int(member): str(member.name) for member in GGMLQuantizationType}
    return known.get(number, f"number {number}")
