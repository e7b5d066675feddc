"""The weights of a bundle's static graphs: shared with model.onnx, or stored once in float16."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper, numpy_helper

from ...errors import ExportError
from ...models.manifest import WeightFormat
from ..checkpoint.layer_weights import FusedLinear
from ..checkpoint.source import ModelSource, QuantizedRows
from ..graph.initializers import HALF_SCALES, INLINE_BELOW, WeightFile, external_tensor
from ..quantization.codes import dequantized, pack_codes, pack_zero_points
from .integer_linears import IntegerLinears

Array = npt.NDArray[Any]

_INTEGERS: Final = {4: TensorProto.INT4, 8: TensorProto.INT8}
_ROWS: Final = 4096
"""Rows that are converted at a time."""


class NpuWeights:
    """Initializers that all static graphs of a bundle share.

    Codes of quantized weights are shared with model.onnx: the initializers refer to its data file. Everything else is
    converted to float16 and written to one further data file, once for all graphs. Methods return the name of an
    initializer. They raise ExportError where a value exceeds the range of float16, and OSError when the disk refuses a
    read or a write.
    """

    def __init__(
        self,
        stored: Iterable[TensorProto],
        folder: Path,
        source: ModelSource,
        data: WeightFile,
        integers: IntegerLinears | None = None,
    ) -> None:
        """Start with nothing.

        Args:
            stored: the initializers of model.onnx.
            folder: the bundle's folder, which has the data file of model.onnx.
            source: the tensors from which model.onnx was written, for norms and biases.
            data: the data file of the static graphs.
            integers: how linears are computed in integers; None for float16.
        """
        self.integers: Final = integers
        self.protos: dict[str, TensorProto] = {}
        """Initializers by name."""
        self.embedding_bytes = 0
        """Bytes of the embedding."""
        self._stored = {proto.name: proto for proto in stored}
        self._folder = folder
        self._source = source if integers is None else integers.source
        self._data = data

    def shared(self, name: str) -> str:
        """Use an initializer of model.onnx as it is: codes, or packed zero points."""
        self.protos.setdefault(name, self._stored[name])
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an initializer of model.onnx."""
        return tuple(self._proto(name).dims)

    def float16(self, name: str, shape: Sequence[int] | None = None) -> str:
        """Store an initializer of model.onnx in float16, in another shape if one is given."""
        if name not in self.protos:
            value = self._array(name)
            self.constant(name, value if shape is None else value.reshape(shape), half=True)
        return name

    def vector(self, name: str, sources: Sequence[str], plus: float = 0.0) -> str:
        """Store concatenated checkpoint vectors (norms, biases) in float16; `plus` is added to each element."""
        if name not in self.protos:
            value = np.concatenate([self._source.read(source) for source in sources])
            self.constant(name, value + np.float32(plus), half=True)
        return name

    def packed_zero_points(self, linear: str, bits: int) -> str:
        """Packed zero points of a linear; an embedding without tied head has them stored unpacked only."""
        name, unpacked = f"{linear}.zero_points", f"{linear}.gathered_zero_points"
        if name in self._stored:
            return self.shared(name)
        return self.constant(name, pack_zero_points(self._array(unpacked)[..., 0], bits))

    def embedding(self, weight_format: WeightFormat, vocabulary: int, columns: int) -> str:
        """Store the token embedding, float16 [vocabulary, columns]: what model.onnx computes from its codes."""
        self.embedding_bytes = 2 * columns * vocabulary
        if weight_format.bits == 32:
            return self.float16("embedding.weight")
        name, codes, scales = "embedding.table", self._array("embedding.codes"), self._array("embedding.scales")[..., 0]
        if name in self.protos:
            return name
        points = None
        if weight_format.zero_points:
            unpacked = self._array("embedding.gathered_zero_points")[..., 0]
            points = pack_zero_points(np.asarray(unpacked), weight_format.bits)
        self.protos[name] = self._data.begin(name, np.dtype(np.float16), (len(codes), columns))
        for start in range(0, len(codes), _ROWS):
            rows = slice(start, start + _ROWS)
            part = None if points is None else points[rows]
            quantized = QuantizedRows(np.asarray(codes[rows]), np.asarray(scales[rows]), zero_points=part)
            self._data.append(_half(name, dequantized(quantized, columns, weight_format)))
        return name

    def integer_matrix(self, integers: IntegerLinears, linear: FusedLinear, name: str, bits: int) -> list[str]:
        """Store a matrix of a linear in 4 or 8 bits: codes [K, N], scales [N] and zero points.

        The HTP takes weights of 4 bits without zero points, but computes wrong values.
        """
        names = [f"{name}.{part}" for part in ("integers", "integer_scales", "integer_zeros")]
        if names[0] not in self.protos:
            codes, scales = integers.matrix(linear, name, bits)
            self.constant(names[1], scales, half=True)
            for each, values in ((names[0], codes), (names[2], np.zeros(len(scales), np.int8))):
                flat = values.view(np.uint8).reshape(-1) & np.uint8((1 << bits) - 1)
                packed = pack_codes(np.pad(flat, (0, len(flat) % 2)), bits)
                place = self._data.name, self._data.start(packed.nbytes), packed.nbytes
                self.protos[each] = external_tensor(each, _INTEGERS[bits], values.shape, *place)
                self._data.append(packed)
        return names

    def constant(self, name: str, value: Array, *, half: bool = False) -> str:
        """Store an array once per name, in float16 if `half`."""
        if name in self.protos:
            return name
        dtype = np.dtype(np.float16) if half else value.dtype
        if value.size * dtype.itemsize < INLINE_BELOW:
            converted = _half(name, value) if half else value
            self.protos[name] = numpy_helper.from_array(np.ascontiguousarray(converted), name)
            return name
        self.protos[name] = self._data.begin(name, dtype, value.shape)
        for start in range(0, len(value), _ROWS):
            rows = value[start : start + _ROWS]
            self._data.append(_half(name, rows) if half else rows)
        return name

    def _array(self, name: str) -> Array:
        """An initializer of model.onnx; large ones are mapped from its data file, not read."""
        proto = self._proto(name)
        if proto.data_location != TensorProto.EXTERNAL:
            return numpy_helper.to_array(proto)
        place = {entry.key: entry.value for entry in proto.external_data}
        dtype = helper.tensor_dtype_to_np_dtype(proto.data_type)
        path, offset = self._folder / place["location"], int(place["offset"])
        return np.memmap(path, dtype, "r", offset, tuple(proto.dims))

    def _proto(self, name: str) -> TensorProto:
        """An initializer of model.onnx; of scales, which may be stored in float16 and converted, the stored ones."""
        linear, _, kind = name.rpartition(".")
        half = f"{linear}.{HALF_SCALES}"
        return self._stored[half if kind == "scales" and half in self._stored else name]


def _half(name: str, value: Array) -> npt.NDArray[np.float16]:
    with np.errstate(over="ignore"):
        converted: npt.NDArray[np.float16] = value.astype(np.float16)
    if not np.isfinite(converted).all():
        raise ExportError(
            f"{name} has a value of {np.abs(value).max():.3g}, beyond the range of float16, in which NPUs compute",
            "leave --device npu out",
        )
    return converted
