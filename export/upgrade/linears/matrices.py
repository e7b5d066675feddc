"""Constant weight matrices of linears, read as [N, K] and rounded while written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from ....models.manifest import WeightFormat
from ...checkpoint.source import in_order
from ...quantization.codes import UInt8Array, blocks_of, quantize_rows
from ..edit.editable import EditableGraph, Node
from ..edit.tensors import Array, Computed, Tensor

Float32Array = npt.NDArray[np.float32]

_CHUNK: Final = 1 << 22
"""Number of weights that are rounded or compared at once."""
_FLOATS: Final = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass(frozen=True, eq=False)
class Matrix:
    """A weight matrix [N, K]: output i is the product of row i and the input."""

    tensor: Tensor
    transposed: bool
    """Whether the tensor is stored as [K, N]."""

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        first, second = self.tensor.shape
        return (second, first) if self.transposed else (first, second)

    def rows(self, start: int, stop: int) -> Float32Array:
        """Read rows `start` to `stop`, float32 [stop - start, K]."""
        stored = self.tensor.array()
        part = stored[:, start:stop].T if self.transposed else stored[start:stop]
        return np.ascontiguousarray(part, np.float32)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield start and stop of chunks of rows that are processed one by one."""
        rows, columns = self.shape
        step = max(1, _CHUNK // max(1, columns))
        for start in range(0, rows, step):
            yield start, min(start + step, rows)

    def equals(self, other: Matrix) -> bool:
        """Whether the other matrix has the same weights, stored once or twice."""
        if self.shape != other.shape:
            return False
        if self.tensor.source is other.tensor.source and self.transposed == other.transposed:
            return True
        return all(np.array_equal(self.rows(*each), other.rows(*each)) for each in self.ranges())


def matrix_of(graph: EditableGraph, node: Node) -> Matrix | None:
    """The constant matrix that a MatMul or Gemm multiplies its input with; None if there is none."""
    if node.op not in ("MatMul", "Gemm") or node.domain or node.attribute("transA", 0):
        return None
    found = _read(graph, node.input(1))
    return None if found is None else Matrix(found.tensor, bool(node.attribute("transB", 0)) == found.transposed)


def table_of(graph: EditableGraph, node: Node) -> Matrix | None:
    """The constant matrix whose rows a Gather looks up; None if there is none."""
    return _read(graph, node.input(0)) if node.op == "Gather" and node.attribute("axis", 0) == 0 else None


def _read(graph: EditableGraph, name: str) -> Matrix | None:
    """A constant float matrix, possibly read through a Transpose."""
    transpose = graph.producer_of(name, "Transpose")
    tensor = graph.tensors.get(name if transpose is None else transpose.input(0))
    if tensor is None or len(tensor.shape) != 2 or tensor.element_type not in _FLOATS:
        return None
    if isinstance(tensor.source, Computed) and tensor.source.widens is not None:
        tensor = replace(tensor.source.widens, shape=tensor.shape)  # to avoid a whole float32 copy
    return Matrix(tensor, transposed=transpose is not None)


class RoundedMatrix:
    """A matrix rounded to nearest in blocks along K (see `quantization.codes`), which is computed when it is written.

    It is rounded only once for both tensors if the codes are read first.
    """

    def __init__(self, matrix: Matrix, weight_format: WeightFormat) -> None:
        rows, columns = matrix.shape
        blocks = blocks_of(columns, weight_format)
        self.format = weight_format
        block_bytes = weight_format.block * weight_format.bits // 8
        self.codes = Tensor.computed(np.uint8, (rows, blocks, block_bytes), self._rounded_codes)
        """uint8 [N, blocks, block * bits / 8]"""
        self.scales = Tensor.computed(np.float32, (rows, blocks), self._rounded_scales)
        """float32 [N, blocks]"""
        self._matrix = matrix
        self._found_scales: list[Float32Array] = []

    def _rounded_codes(self) -> Iterator[Array]:
        self._found_scales = []
        for packed, scales in in_order(self._round, self._matrix.ranges()):
            self._found_scales.append(scales)
            yield packed

    def _rounded_scales(self) -> Iterator[Array]:
        if not self._found_scales:
            for _ in self._rounded_codes():
                pass
        yield from self._found_scales

    def _round(self, part: tuple[int, int]) -> tuple[UInt8Array, Float32Array]:
        return quantize_rows(self._matrix.rows(*part), self.format)
