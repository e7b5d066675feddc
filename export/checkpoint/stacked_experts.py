"""All experts of a layer in one tensor: the matrix of their rows, one expert under the other.

Two ways of keeping it are known. In floats, [experts, K, N]: each expert lies on its side. In MXFP4 (OCP Microscaling
Formats 1.0), blocks [experts, N, K / 32, 16] of codes, the first of two in the lower half of a byte, and scales
[experts, N, K / 32]: a weight is one of sixteen values times 2 ** (scale - 127).
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
"""What the codes stand for: the highest bit is the sign."""
_BIAS: Final = 127


@dataclass(frozen=True)
class FloatStack:
    """Experts on their sides."""

    experts: int
    rows: int
    """Of an expert, N."""
    columns: int
    read: Callable[[int, int], Float32Array]
    """Some of the tensor's numbers, flat: first and count."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix."""
        return self.experts * self.rows, self.columns

    def read_rows(self, start: int, stop: int) -> Float32Array:
        """Rows of the matrix, float32 [stop - start, columns]; experts are read whole."""
        first, last = start // self.rows, -(-stop // self.rows)
        size = self.rows * self.columns
        upright = self.read(first * size, (last - first) * size).reshape(-1, self.columns, self.rows).transpose(0, 2, 1)
        begin = start - first * self.rows
        return np.ascontiguousarray(upright.reshape(-1, self.columns)[begin : begin + stop - start])


@dataclass(frozen=True)
class Mxfp4Stack:
    """Experts in blocks of 32 codes."""

    experts: int
    rows: int
    """Of an expert, N."""
    columns: int
    blocks: Callable[[int, int], UInt8Array]
    """Some bytes of codes, flat: first and count."""
    scales: Callable[[int, int], UInt8Array]
    """Some scales likewise."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix."""
        return self.experts * self.rows, self.columns

    def read_rows(self, start: int, stop: int) -> Float32Array:
        """Rows of the matrix, float32 [stop - start, columns]."""
        each, half = self.columns // 32, self.columns // 2
        codes = self.blocks(start * half, (stop - start) * half).reshape(-1, 16)
        exponents = self.scales(start * each, (stop - start) * each).astype(np.int32) - _BIAS
        weights: npt.NDArray[np.float32] = FP4[np.stack([codes & 15, codes >> 4], axis=-1).reshape(-1, 32)]
        with np.errstate(over="ignore"):  # damaged scales are found in the result
            return np.ldexp(weights, exponents[:, None]).reshape(-1, self.columns)
