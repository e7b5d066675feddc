"""The graph's initializers: read from the checkpoint, stored as the plan asks, streamed into the external data file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper, numpy_helper

from ..models.manifest import WeightFormat
from .layout import Unit
from .prefetch import in_order
from .quantize import blocks_of
from .source import Float32Array, ModelSource, RowRange, UInt8Array
from .weightfile import WeightFile

_WORKERS: Final = 2
_INLINE_BELOW: Final = 1024
"""Bytes of a constant that goes into the .onnx file itself, where shape inference can see it."""


class Initializers:
    """Collects initializers in memory and writes the bytes of all but the smallest to the data file as they come.

    Methods return the name of the initializer they add. They raise CheckpointError when a tensor cannot be read and
    OSError when the disk refuses a write.
    """

    def __init__(self, checkpoint: ModelSource, data: WeightFile, stored: Callable[[int], None]) -> None:
        """`stored` hears the number of weights just written."""
        self.protos: list[TensorProto] = []
        self.unit_bits: dict[str, int] = {}
        """Stored bits by unit, scales and padding included; a shared matrix counts once."""
        self._checkpoint = checkpoint
        self._data = data
        self._stored = stored

    def constant(self, name: str, value: npt.NDArray[np.generic]) -> str:
        """Add an array that is already in memory."""
        if value.nbytes < _INLINE_BELOW:
            self.protos.append(numpy_helper.from_array(value, name))
            return name
        self._begin(name, value.dtype, value.shape)
        self._data.append(value)
        return name

    def vector(self, name: str, sources: Sequence[str], plus: float = 0.0) -> str:
        """Add checkpoint vectors (norms, biases) one after the other, in float32; `plus` is added to each number."""
        value = np.concatenate([self._checkpoint.read(source) for source in sources])
        return self.constant(name, value + np.float32(plus) if plus else value)

    def plain(self, unit: Unit) -> str:
        """Add a unit's matrix [N, K] in float32."""
        name = f"{unit.name}.weight"
        self._begin(name, np.dtype(np.float32), unit.shape, unit)
        for source in unit.weights:
            for piece in self._checkpoint.pieces(source):
                self._data.append(piece)
                self._stored(piece.size)
        return name

    def plain_transposed(self, unit: Unit) -> str:
        """Add the transpose [K, N] of a unit's matrix in float32; the whole matrix is in memory meanwhile."""
        name = f"{unit.name}.weight"
        self._begin(name, np.dtype(np.float32), unit.shape[::-1], unit)
        matrix = np.concatenate([self._checkpoint.read(source) for source in unit.weights])
        self._data.append(matrix.T)
        self._stored(matrix.size)
        return name

    def quantized(self, unit: Unit, form: WeightFormat, gathered: bool = False) -> tuple[str, str]:
        """Add a unit's matrix in blocks along K (see `quantize`).

        Returns:
            Names of the codes, uint8 [N, blocks, block * bits / 8], and of the scales, float32 [N, blocks], or
            [N, blocks, 1] as GatherBlockQuantized wants them when the matrix is `gathered` from.
        """
        rows, columns = unit.shape
        blocks = blocks_of(columns, form)
        codes, scales = f"{unit.name}.codes", f"{unit.name}.scales"

        def quantize(part: RowRange) -> tuple[UInt8Array, Float32Array]:
            return self._checkpoint.coded(part, form)

        self._begin(codes, np.dtype(np.uint8), (rows, blocks, form.block * form.bits // 8), unit)
        all_scales: list[Float32Array] = []
        parts = chain.from_iterable(self._checkpoint.row_ranges(source) for source in unit.weights)
        for packed, piece_scales in in_order(quantize, parts):
            self._data.append(packed)
            all_scales.append(piece_scales)
            self._stored(len(packed) * columns)
        self._begin(scales, np.dtype(np.float32), (rows, blocks, 1) if gathered else (rows, blocks), unit)
        self._data.append(np.concatenate(all_scales))
        return codes, scales

    def reshaped(self, name: str, alias: str, shape: Sequence[int]) -> str:
        """Add a tensor of another shape over the bytes of the initializer `name`."""
        proto = TensorProto()
        proto.CopyFrom(next(proto for proto in self.protos if proto.name == name))
        proto.name = alias
        del proto.dims[:]
        proto.dims.extend(shape)
        self.protos.append(proto)
        return alias

    def _begin(self, name: str, dtype: np.dtype[np.generic], shape: Sequence[int], unit: Unit | None = None) -> None:
        length = int(np.prod(shape)) * dtype.itemsize
        if unit is not None:
            self.unit_bits[unit.name] = self.unit_bits.get(unit.name, 0) + 8 * length
        proto = TensorProto(name=name, dims=shape, data_location=TensorProto.EXTERNAL)
        proto.data_type = helper.np_dtype_to_tensor_dtype(dtype)
        offset = self._data.start(length)
        for key, value in (("location", self._data.name), ("offset", offset), ("length", length)):
            proto.external_data.add(key=key, value=str(value))
        self.protos.append(proto)
