"""Constant matrices of linears, read as rows [N, K] whichever way the graph stores them, and rounded while written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from ....models.manifest import WeightFormat
from ...checkpoint.prefetch import in_order
from ...quantization.codes import UInt8Array, blocks_of, quantize_rows
from ..edit.editable import EditableGraph, Node
from ..edit.tensors import Array, Computed, Tensor

Float32Array = npt.NDArray[np.float32]

_AT_ONCE: Final = 1 << 22
"""Weights rounded or compared in one piece."""
_FLOATS: Final = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass(frozen=True, eq=False)
class Matrix:
    """A weight matrix, [N, K]: output i is row i times the input."""

    tensor: Tensor
    turned: bool
    """Whether the tensor is [K, N]."""

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        first, second = self.tensor.shape
        return (second, first) if self.turned else (first, second)

    def rows(self, start: int, stop: int) -> Float32Array:
        """Some of the rows, float32 [stop - start, K]."""
        stored = self.tensor.array()
        part = stored[:, start:stop].T if self.turned else stored[start:stop]
        return np.ascontiguousarray(part, np.float32)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Start and stop of pieces that are worked on one after the other."""
        rows, columns = self.shape
        step = max(1, _AT_ONCE // max(1, columns))
        for start in range(0, rows, step):
            yield start, min(start + step, rows)

    def equals(self, other: Matrix) -> bool:
        """Whether it is the same matrix, stored once or twice."""
        if self.shape != other.shape:
            return False
        if self.tensor.source is other.tensor.source and self.turned == other.turned:
            return True
        return all(np.array_equal(self.rows(*each), other.rows(*each)) for each in self.ranges())


def matrix_of(graph: EditableGraph, node: Node) -> Matrix | None:
    """The constant matrix that a MatMul or Gemm multiplies its input with; None if it is not of that kind."""
    if node.op not in ("MatMul", "Gemm") or node.domain or node.attribute("transA", 0):
        return None
    found = _read(graph, node.input(1))
    return None if found is None else Matrix(found.tensor, bool(node.attribute("transB", 0)) == found.turned)


def table_of(graph: EditableGraph, node: Node) -> Matrix | None:
    """The constant matrix whose rows a Gather looks up; None if it is not of that kind."""
    return _read(graph, node.input(0)) if node.op == "Gather" and node.attribute("axis", 0) == 0 else None


def _read(graph: EditableGraph, name: str) -> Matrix | None:
    """A constant of floats with two axes, or one turned over."""
    transposed = graph.producer_of(name, "Transpose")
    tensor = graph.tensors.get(name if transposed is None else transposed.input(0))
    if tensor is None or len(tensor.shape) != 2 or tensor.element_type not in _FLOATS:
        return None
    if isinstance(tensor.source, Computed) and tensor.source.widens is not None:
        tensor = replace(tensor.source.widens, shape=tensor.shape)  # not all of it at once in float32
    return Matrix(tensor, turned=transposed is not None)


@dataclass(frozen=True, eq=False)
class RoundedMatrix:
    """A matrix in blocks along K (see `quantization.codes`)."""

    form: WeightFormat
    codes: Tensor
    """uint8 [N, blocks, block * bits / 8]"""
    scales: Tensor
    """float32 [N, blocks]"""


def rounded(matrix: Matrix, form: WeightFormat) -> RoundedMatrix:
    """The matrix rounded to nearest when it is written; until then nothing is computed."""
    rows, columns = matrix.shape
    blocks = blocks_of(columns, form)
    rounding = _Rounding(matrix, form)
    return RoundedMatrix(
        form,
        Tensor.computed(np.uint8, (rows, blocks, form.block * form.bits // 8), rounding.codes),
        Tensor.computed(np.float32, (rows, blocks), rounding.scales),
    )


class _Rounding:
    """Rounds once for both tensors if the codes are asked for first."""

    def __init__(self, matrix: Matrix, form: WeightFormat) -> None:
        self._matrix = matrix
        self._form = form
        self._scales: list[Float32Array] = []

    def codes(self) -> Iterator[Array]:
        self._scales = []
        for packed, scales in in_order(self._round, self._matrix.ranges()):
            self._scales.append(scales)
            yield packed

    def scales(self) -> Iterator[Array]:
        if not self._scales:
            for _ in self.codes():
                pass
        yield from self._scales

    def _round(self, part: tuple[int, int]) -> tuple[UInt8Array, Float32Array]:
        return quantize_rows(self._matrix.rows(*part), self._form)
