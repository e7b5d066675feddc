"""Tensors that hold all experts of a layer, as one matrix.

Float tensors have shape [experts, K, N], so each expert is transposed. MXFP4 tensors (Source: OCP Microscaling Formats
1.0) have blocks [experts, N, K / 32, 16] of codes, the first of two in the low nibble of a byte, and scales [experts,
N, K / 32]: a weight is one of sixteen values times 2 ** (scale - 127).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from .source import Float32Array, UInt8Array

_VALUES: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4: Final = np.concatenate([_VALUES, -_VALUES])
"""The value of each FP4 code; the highest bit is the sign."""
_EXPONENT_BIAS: Final = 127


@dataclass(frozen=True)
class FloatStack:
    """Experts in one float tensor, each transposed."""

    experts: int
    rows: int
    """Rows per expert (N)."""
    columns: int
    read: Callable[[int, int], Float32Array]
    """Reads elements of the flattened tensor, from an index and a count."""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix of all experts, one under the other."""
        return self.experts * self.rows, self.columns

    def read_rows(self, start: int, stop: int) -> Float32Array:
        """Read rows of the matrix, float32 [stop - start, columns]; whole experts are read from the file."""
        first, last = start // self.rows, -(-stop // self.rows)
        size = self.rows * self.columns
        matrices = (
            self.read(first * size, (last - first) * size).reshape(-1, self.columns, self.rows).transpose(0, 2, 1)
        )
        begin = start - first * self.rows
        return np.ascontiguousarray(matrices.reshape(-1, self.columns)[begin : begin + stop - start])


@dataclass(frozen=True)
class Mxfp4Stack:
    """Experts in MXFP4."""

    experts: int
    rows: int
    """Rows per expert (N)."""
    columns: int
    blocks: Callable[[int, int], UInt8Array]
    """Reads bytes of the flattened codes, from an index and a count."""
    scales: Callable[[int, int], UInt8Array]
    """Reads bytes of the flattened scales, from an index and a count."""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix of all experts, one under the other."""
        return self.experts * self.rows, self.columns

    def read_rows(self, start: int, stop: int) -> Float32Array:
        """Read rows of the matrix, float32 [stop - start, columns]."""
        blocks, half = self.columns // 32, self.columns // 2
        codes = self.blocks(start * half, (stop - start) * half).reshape(-1, 16)
        exponents = self.scales(start * blocks, (stop - start) * blocks).astype(np.int32) - _EXPONENT_BIAS
        weights: npt.NDArray[np.float32] = FP4[np.stack([codes & 15, codes >> 4], axis=-1).reshape(-1, 32)]
        with np.errstate(over="ignore"):  # callers check the result for NaN and infinity
            return np.ldexp(weights, exponents[:, None]).reshape(-1, self.columns)
