"""The weights of a bundle's static graphs: shared with model.onnx, stored once in float16, or as integers.

Linears may have integer inputs, weights and outputs, for the integer units of NPUs. Inputs and outputs have one scale
and zero point a tensor, weights one scale an output and no zero point. Operators in float16 between such linears take
and return rounded values (`QuantizeLinear`, `DequantizeLinear`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, numpy_helper

from ...errors import ExportError
from ...models.bundle import GRAPH_NAME
from ...models.manifest import WeightFormat
from ...models.onnx_file.graph_editor import GraphEditor
from ..checkpoint.layer_weights import FusedLinear
from ..checkpoint.source import Float32Array, ModelSource, QuantizedRows
from ..graph.initializers import INLINE_BELOW, WeightFile, external_tensor
from ..quantization.codes import (
    InputStatistics,
    StatisticsOf,
    dequantized,
    half_precision,
    in_blocks,
    pack_codes,
    pack_zero_points,
    rounded_rows,
    unpack_codes,
)
from ..quantization.gptq import gptq_rows

HEAD_BITS: Final = 16
"""Bits of inputs and outputs of the LM head: logits differ by less than 8 bits can tell."""
_SHRINKS: Final = {4: tuple(1 - step / 20 for step in range(10)), 8: (1.0,)}
"""Candidates of a scale by bits, relative to the one that reaches the largest weight."""
_LEAST_SCALE: Final = 1e-6
"""Smallest scale: one that float16 has, if with few digits."""


@dataclass(frozen=True)
class IntegerLinears:
    """How the linears of a model are computed in integers."""

    bits: int
    """Bits of inputs and outputs, 8 or 16."""
    source: ModelSource
    """The weights, norms and biases, SmoothQuant's factors applied; like the other fields."""
    statistics: StatisticsOf
    """Statistics of the linears' inputs."""
    ranges: Mapping[str, Float32Array]
    """Smallest and largest values of channels, 0 included, float32 [2, channels]: of inputs by the name of the linear,
    of outputs without the bias by the name of the matrix."""

    def matrix(self, linear: FusedLinear, name: str, bits: int) -> tuple[npt.NDArray[np.int8], Float32Array]:
        """Quantize a matrix of a linear by GPTQ.

        Returns:
            Codes, int8 [K, N], and scales, float16 numbers in float32 [N].

        Raises:
            CheckpointError: the matrix cannot be read.
        """
        # Codes are packed in pairs.
        one_block, inputs = WeightFormat(bits, linear.columns + linear.columns % 2), self.statistics(linear.name)
        rows = gptq_rows(self.source.read(name), one_block, inputs, scales_of=_symmetric_rows)
        codes = unpack_codes(rows.packed, bits)[:, 0, : linear.columns].T.astype(np.int16) - (1 << (bits - 1))
        return np.ascontiguousarray(codes, np.int8), rows.scales[:, 0]


def integer_range(values: Float32Array, bits: int) -> tuple[npt.NDArray[np.float16], npt.NDArray[Any]]:
    """Scale and zero point, unsigned, with which integers reach the range [2, channels] of values; 0 is exact."""
    exact = max(float(np.ptp(values)) / ((1 << bits) - 1), _LEAST_SCALE)
    # The next float16 number above, so that the largest values are not cut off.
    scale = np.nextafter(np.float16(exact), np.float16(np.inf))
    return np.array(scale), np.array(round(-float(values.min()) / float(scale)), np.uint8 if bits == 8 else np.uint16)


def _symmetric_rows(
    weights: Float32Array, weight_format: WeightFormat, inputs: InputStatistics | None = None
) -> QuantizedRows:
    """Quantize rows [N, K] with one positive float16 scale each, that of the least squared error; see `Quantizer`."""
    importance = np.ones(weights.shape[1], np.float32) if inputs is None else inputs.mean_square
    largest, half = np.abs(weights).max(axis=1, keepdims=True), 1 << (weight_format.bits - 1)
    best, least = np.empty_like(largest), np.full(largest.shape, np.inf)
    for shrink in _SHRINKS[weight_format.bits]:
        scales = half_precision(np.maximum(largest * np.float32(shrink / (half - 1)), np.float32(_LEAST_SCALE)))
        rounded = np.clip(np.rint(weights / scales), -half, half - 1) * scales
        error = np.square(rounded - weights) @ importance[:, None]
        best, least = np.where(error < least, scales, best), np.minimum(error, least)
    return rounded_rows(in_blocks(weights, weight_format), best, None, weight_format.bits)


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
            folder: the bundle's folder, which has model.onnx and its data file.
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
        self._model = GraphEditor(folder / GRAPH_NAME)
        self._source = source if integers is None else integers.source
        self._data = data

    def shared(self, name: str) -> str:
        """Use an initializer of model.onnx as it is: codes, or packed zero points."""
        self.protos.setdefault(name, self._stored[name])
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an initializer of model.onnx."""
        return self._array(name).shape

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
        found = self._model.array(name)
        assert found is not None  # noqa: S101 -- the exporter has just written it
        return found


def _half(name: str, value: Array) -> npt.NDArray[np.float16]:
    with np.errstate(over="ignore"):
        converted: npt.NDArray[np.float16] = value.astype(np.float16)
    if not np.isfinite(converted).all():
        raise ExportError(
            f"{name} has a value of {np.abs(value).max():.3g}, beyond the range of float16, in which NPUs compute",
            "leave --device npu out",
        )
    return converted
