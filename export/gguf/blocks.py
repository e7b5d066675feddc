"""The types a GGUF tensor may have: decoding their blocks, and carrying codes over where the operators have them too.

Q4_0, Q5_0 and Q8_0 store blocks of 32 weights as `w = d * q` with one float16 d and a signed q of 4, 5 or 8 bits. That
is the form of `quantize`, w = (code - half) * scale: the codes are moved, the scale is widened to float32, and nothing
is rounded. All other types are decoded by the `gguf` package and, where codes are asked for, rounded anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ...models.manifest import WeightFormat
from ..source import Float32Array, UInt8Array

SignedBlocks = tuple[npt.NDArray[np.int16], Float32Array]
"""Signed codes [blocks, 32] and their scales [blocks]."""

_FP32: Final = WeightFormat(32)
_INT8: Final = WeightFormat(8, 32)
_INT4: Final = WeightFormat(4, 32)


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
    signed: Callable[[UInt8Array], SignedBlocks] | None = None
    """Splits raw blocks [blocks, bytes] into codes and scales, exactly; None where the type has no such form."""
    signed_bits: int = 0
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

    def codes(self, raw: UInt8Array, form: WeightFormat) -> tuple[UInt8Array, Float32Array] | None:
        """The codes of raw rows as `form` has them, [rows, blocks, 32], and scales [rows, blocks].

        None where they cannot be carried over exactly.
        """
        if self.signed is None or form.block != self.weights or form.bits < self.signed_bits:
            return None
        signed, scales = self.signed(raw.reshape(-1, self.bytes))
        codes = (signed + (1 << (form.bits - 1))).astype(np.uint8)
        return codes.reshape(len(raw), -1, self.weights), scales.reshape(len(raw), -1)


def _scales(blocks: UInt8Array) -> Float32Array:
    """The float16 at the start of each block."""
    scales: Float32Array = blocks[:, :2].copy().view("<f2")[:, 0].astype(np.float32)
    return scales


def _nibbles(packed: UInt8Array) -> npt.NDArray[np.int16]:
    """Sixteen bytes to 32 codes: all low halves, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.int16)


def _signed_q4_0(blocks: UInt8Array) -> SignedBlocks:
    return _nibbles(blocks[:, 2:]) - 8, _scales(blocks)


def _signed_q5_0(blocks: UInt8Array) -> SignedBlocks:
    fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little").astype(np.int16)
    return (_nibbles(blocks[:, 6:]) | fifth << 4) - 16, _scales(blocks)


def _signed_q8_0(blocks: UInt8Array) -> SignedBlocks:
    return blocks[:, 2:].view(np.int8).astype(np.int16), _scales(blocks)


TYPES: Final = {
    kind.number: kind
    for kind in (
        TensorType("F32", 0, 1, 4, _FP32),
        TensorType("F16", 1, 1, 2, _FP32),
        TensorType("BF16", 30, 1, 2, _FP32),
        TensorType("Q4_0", 2, 32, 18, _INT4, _signed_q4_0, 4),
        TensorType("Q4_1", 3, 32, 20, _INT4),
        TensorType("Q5_0", 6, 32, 22, _INT8, _signed_q5_0, 5),
        TensorType("Q5_1", 7, 32, 24, _INT8),
        TensorType("Q8_0", 8, 32, 34, _INT8, _signed_q8_0, 8),
        TensorType("Q4_K", 12, 256, 144, _INT4),
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
