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
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .source import Float32Array, UInt8Array

_VALUES: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4: Final = np.concatenate([_VALUES, -_VALUES])
"""The value of each FP4 code; the highest bit is the sign."""
_EXPONENT_BIAS: Final = 127


class ExpertStack(NamedTuple):
    """All experts of a layer in one tensor."""

    experts: int
    rows: int
    """Rows per expert (N)."""
    columns: int
    whole: bool
    """Whether whole experts are read from the file."""
    read_rows: Callable[[int, int], Float32Array]
    """Reads rows of the matrix from a first to before a last one, float32 [rows, columns]."""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix of all experts, one under the other."""
        return self.experts * self.rows, self.columns


def float_stack(experts: int, rows: int, columns: int, read: Callable[[int, int], Float32Array]) -> ExpertStack:
    """Experts in one float tensor, each transposed.

    `read` gives elements of the flattened tensor, from an index and a count.
    """

    def read_rows(start: int, stop: int) -> Float32Array:
        first, last = start // rows, -(-stop // rows)
        elements = read(first * rows * columns, (last - first) * rows * columns)
        matrices = elements.reshape(-1, columns, rows).transpose(0, 2, 1)
        begin = start - first * rows
        return np.ascontiguousarray(matrices.reshape(-1, columns)[begin : begin + stop - start])

    return ExpertStack(experts, rows, columns, True, read_rows)


def mxfp4_stack(
    experts: int,
    rows: int,
    columns: int,
    read_codes: Callable[[int, int], UInt8Array],
    read_scales: Callable[[int, int], UInt8Array],
) -> ExpertStack:
    """Experts in MXFP4; `read_codes` and `read_scales` give bytes of both tensors, from an index and a count."""

    def read_rows(start: int, stop: int) -> Float32Array:
        blocks, half = columns // 32, columns // 2
        codes = read_codes(start * half, (stop - start) * half).reshape(-1, 16)
        exponents = read_scales(start * blocks, (stop - start) * blocks).astype(np.int32) - _EXPONENT_BIAS
        weights: npt.NDArray[np.float32] = FP4[np.stack([codes & 15, codes >> 4], axis=-1).reshape(-1, 32)]
        with np.errstate(over="ignore"):  # callers check the result for NaN and infinity
            return np.ldexp(weights, exponents[:, None]).reshape(-1, columns)

    return ExpertStack(experts, rows, columns, False, read_rows)


_EXPERT: Final = re.compile(
    r"(?P<module>.+)\.experts\.(?P<expert>[0-9]{1,6})\.(?P<projection>gate|up|down)_proj\.weight"
)


def expert_part(name: str) -> tuple[tuple[str, ...], int, int, int] | None:
    """Where to look for the tensor of one expert, such as `mlp.experts.3.up_proj.weight`; None for other tensors.

    Returns:
        Names that a tensor of all experts may have, of shape [experts, parts * N, K]; the expert; which of the parts it
        is, from the top; and the number of parts.
    """
    found = _EXPERT.fullmatch(name)
    if found is None:
        return None
    module, expert, projection = found["module"], int(found["expert"]), found["projection"]
    if projection == "down":
        return (f"{module}.experts.down_proj", f"{module}.output_linear.weight"), expert, 0, 1
    return (f"{module}.experts.gate_up_proj", f"{module}.input_linear.weight"), expert, int(projection == "up"), 2
