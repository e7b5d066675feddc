"""Tensors that hold all experts of a layer, as one matrix or as matrices of single experts.

Those of gpt-oss become one matrix. Float tensors have shape [experts, K, N], so each expert is transposed. MXFP4
tensors (Source: OCP Microscaling Formats 1.0) have blocks [experts, N, K / 32, 16] of codes, the first of two in the
low nibble of a byte, and scales [experts, N, K / 32]: a weight is one of sixteen values times 2 ** (scale - 127).

Those of Qwen3.5 and Granite have shape [experts, N, K], with the rows of gate above those of up. There the matrix of
each expert lies in one piece, so it reads like a tensor of its own, as other releases of the same models have it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .source import Float32Array, UInt8Array

_VALUES: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4: Final = np.concatenate([_VALUES, -_VALUES])
"""The value of each FP4 code; the highest bit is the sign."""
_EXPONENT_BIAS: Final = 127


@dataclass(frozen=True)
class _Stack:
    """All experts of a layer in one tensor."""

    experts: int
    rows: int
    """Rows per expert (N)."""
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix of all experts, one under the other."""
        return self.experts * self.rows, self.columns


@dataclass(frozen=True)
class FloatStack(_Stack):
    """Experts in one float tensor, each transposed."""

    read: Callable[[int, int], Float32Array]
    """Reads elements of the flattened tensor, from an index and a count."""

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
class Mxfp4Stack(_Stack):
    """Experts in MXFP4."""

    blocks: Callable[[int, int], UInt8Array]
    """Reads bytes of the flattened codes, from an index and a count."""
    scales: Callable[[int, int], UInt8Array]
    """Reads bytes of the flattened scales, from an index and a count."""

    def read_rows(self, start: int, stop: int) -> Float32Array:
        """Read rows of the matrix, float32 [stop - start, columns]."""
        blocks, half = self.columns // 32, self.columns // 2
        codes = self.blocks(start * half, (stop - start) * half).reshape(-1, 16)
        exponents = self.scales(start * blocks, (stop - start) * blocks).astype(np.int32) - _EXPONENT_BIAS
        weights: npt.NDArray[np.float32] = FP4[np.stack([codes & 15, codes >> 4], axis=-1).reshape(-1, 32)]
        with np.errstate(over="ignore"):  # callers check the result for NaN and infinity
            return np.ldexp(weights, exponents[:, None]).reshape(-1, self.columns)


class ExpertPart(NamedTuple):
    """Where the matrix of one expert may lie among those of all experts of a layer."""

    tensors: tuple[str, ...]
    """Names that a tensor of shape [experts, parts * N, K] may have."""
    expert: int
    part: int
    """Which of the parts it is, from the top."""
    parts: int


_EXPERT: Final = re.compile(
    r"(?P<module>.+)\.experts\.(?P<expert>[0-9]{1,6})\.(?P<projection>gate|up|down)_proj\.weight"
)


def expert_part(name: str) -> ExpertPart | None:
    """Where to look for the tensor of one expert, such as `mlp.experts.3.up_proj.weight`; None for other tensors."""
    found = _EXPERT.fullmatch(name)
    if found is None:
        return None
    module, expert, projection = found["module"], int(found["expert"]), found["projection"]
    if projection == "down":
        return ExpertPart((f"{module}.experts.down_proj", f"{module}.output_linear.weight"), expert, 0, 1)
    stacks = (f"{module}.experts.gate_up_proj", f"{module}.input_linear.weight")
    return ExpertPart(stacks, expert, int(projection == "up"), 2)
