"""Weights of the graph: read from the checkpoint, stored as the plan asks, streamed into the external data file."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, numpy_helper

from ..models.manifest import WeightFormat
from .checkpoint import Checkpoint, Float32Array
from .quantize import UInt8Array, blocks_of, quantize_rows
from .weightfile import Extent, WeightFile

_WORKERS: Final = 2
_INLINE_BELOW: Final = 1024
_Result = TypeVar("_Result")


class Initializers:
    """Collects a graph's initializers; big ones go to the data file as they come."""

    def __init__(self, checkpoint: Checkpoint, data: WeightFile, data_name: str, stored: Callable[[int], None]) -> None:
        """`stored` hears the number of weights just written, for a progress display."""
        self.protos: list[TensorProto] = []
        self.unit_bits: dict[str, int] = {}
        """Stored bits by unit, scales and padding included."""
        self.unit_weights: dict[str, int] = {}
        """Number of weights by unit."""
        self._checkpoint = checkpoint
        self._data = data
        self._data_name = data_name
        self._stored = stored

    def small(self, name: str, value: npt.NDArray[np.generic]) -> str:
        """Add a constant that is already in memory."""
        if value.nbytes < _INLINE_BELOW:
            self.protos.append(numpy_helper.from_array(value, name))
            return name
        extent = self._data.start(value.nbytes)
        self._data.append(value)
        return self._external(name, value.dtype, value.shape, extent)

    def tensor(self, name: str) -> str:
        """Add a checkpoint tensor (a norm's weight) as it is, in float32."""
        value = self._checkpoint.read(name)
        self._stored(value.size)
        return self.small(name, value)

    def joined(self, name: str, sources: Sequence[str]) -> str:
        """Add the concatenation of checkpoint vectors (the biases of a fused linear)."""
        values = [self._checkpoint.read(source) for source in sources]
        return self.small(name, np.concatenate(values))

    def plain(self, unit: str, sources: Sequence[str], transposed: bool) -> str:
        """Add the float32 matrices `sources`, one under the other as [N, K], or their transpose [K, N]."""
        rows, columns = shape = self.joined_shape(sources)
        name = f"{unit}.weight"
        self._account(unit, shape, 32 * rows * columns)
        extent = self._data.start(4 * rows * columns)
        if transposed:
            # Written by columns of the transpose, so one fused matrix is in memory.
            matrix = np.concatenate([self._checkpoint.read(source) for source in sources])
            self._data.append(matrix.T)
            self._stored(matrix.size)
            return self._external(name, np.dtype(np.float32), (columns, rows), extent)
        for source, start, stop in self._pieces(sources):
            piece = self._checkpoint.read_rows(source, start, stop)
            self._data.append(piece)
            self._stored(piece.size)
        return self._external(name, np.dtype(np.float32), shape, extent)

    def quantized(self, unit: str, sources: Sequence[str], form: WeightFormat) -> tuple[str, str]:
        """Add the matrices `sources`, one under the other as [N, K], in blocks along K.

        Returns:
            Names of the codes, uint8 [N, blocks, block * bits / 8], and of the scales, float32 [N, blocks].
        """
        rows, columns = shape = self.joined_shape(sources)
        blocks = blocks_of(columns, form)
        packed_bytes = form.block * form.bits // 8
        self._account(unit, shape, rows * blocks * (8 * packed_bytes + 32))
        extent = self._data.start(rows * blocks * packed_bytes)

        def quantize(part: tuple[str, int, int]) -> tuple[UInt8Array, Float32Array]:
            return quantize_rows(self._checkpoint.read_rows(*part), form)

        scales: list[Float32Array] = []
        for packed, piece_scales in _in_order(quantize, self._pieces(sources)):
            self._data.append(packed)
            scales.append(piece_scales)
            self._stored(len(packed) * columns)
        codes = self._external(f"{unit}.codes", np.dtype(np.uint8), (rows, blocks, packed_bytes), extent)
        extent = self._data.start(4 * rows * blocks)
        self._data.append(np.concatenate(scales))
        return codes, self._external(f"{unit}.scales", np.dtype(np.float32), (rows, blocks), extent)

    def reshaped(self, name: str, alias: str, shape: Sequence[int]) -> str:
        """Add `alias`, a tensor of another shape over the bytes of the external initializer `name`."""
        original = next(proto for proto in self.protos if proto.name == name)
        proto = TensorProto()
        proto.CopyFrom(original)
        proto.name = alias
        del proto.dims[:]
        proto.dims.extend(shape)
        self.protos.append(proto)
        return alias

    def joined_shape(self, sources: Sequence[str]) -> tuple[int, int]:
        """Shape [N, K] of matrices one under the other."""
        shapes = [self._checkpoint.shape(source) for source in sources]
        return sum(shape[0] for shape in shapes), shapes[0][1]

    def _pieces(self, sources: Sequence[str]) -> Iterator[tuple[str, int, int]]:
        for source in sources:
            for start, stop in self._checkpoint.pieces(source):
                yield source, start, stop

    def _account(self, unit: str, shape: tuple[int, int], bits: int) -> None:
        self.unit_bits[unit] = bits
        self.unit_weights[unit] = math.prod(shape)

    def _external(
        self, name: str, dtype: np.dtype[np.generic], shape: Sequence[int], extent: Extent
    ) -> str:
        proto = TensorProto(name=name, dims=shape, data_location=TensorProto.EXTERNAL)
        proto.data_type = TensorProto.UINT8 if dtype == np.uint8 else TensorProto.FLOAT
        for key, value in (("location", self._data_name), ("offset", extent.offset), ("length", extent.length)):
            proto.external_data.add(key=key, value=str(value))
        self.protos.append(proto)
        return name


def _in_order(
    work: Callable[[tuple[str, int, int]], _Result], parts: Iterator[tuple[str, int, int]]
) -> Iterator[_Result]:
    """Results of `work` in the order of `parts`, on threads that run a few parts ahead (NumPy releases the lock)."""
    with ThreadPoolExecutor(_WORKERS) as pool:
        ahead: deque[Future[_Result]] = deque()
        for part in parts:
            ahead.append(pool.submit(work, part))
            if len(ahead) > 2 * _WORKERS:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
