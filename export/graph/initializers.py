"""The graph's initializers: read from the checkpoint, stored as the plan asks, streamed into the external data file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper, numpy_helper

from ...models.manifest import WeightFormat
from ..checkpoint.layout import FusedLinear
from ..checkpoint.prefetch import in_order
from ..checkpoint.source import Float32Array, LowRankFactors, ModelSource, RowRange, UInt8Array
from ..quantization.codes import OFFSETS, blocks_of, quantize_rows, unpack_zero_points
from .weight_file import WeightFile

_WORKERS: Final = 2
_INLINE_BELOW: Final = 1024
"""Bytes of a constant that goes into the .onnx file itself, where shape inference can see it."""


class _BesideCodes(NamedTuple):
    """What belongs to a matrix's codes."""

    scales: Float32Array
    """[N, blocks]."""
    offsets: Float32Array
    """[N, blocks], zeros where it has none."""
    points: UInt8Array
    """Zero points as in `QuantizedRows`; empty where it has none."""
    factors: Sequence[LowRankFactors]
    """What repairs the rows of each piece, from top to bottom; empty where nothing does."""


class StoredMatrix(NamedTuple):
    """The names of a quantized matrix's initializers."""

    codes: str
    scales: str
    zero_points: str = ""
    """Empty where the format has none."""

    def inputs(self, bias: str = "") -> list[str]:
        """What MatMulNBits takes after the rows it multiplies."""
        inputs = [self.codes, self.scales, self.zero_points, "", bias]
        while not inputs[-1]:
            inputs.pop()
        return inputs


class Initializers:
    """Collects initializers in memory and writes the bytes of all but the smallest to the data file as they come.

    Methods return the name of the initializer they add. They raise CheckpointError when a tensor cannot be read and
    OSError when the disk refuses a write.
    """

    def __init__(self, checkpoint: ModelSource, data: WeightFile, stored: Callable[[int], None]) -> None:
        """`stored` hears the number of weights just written."""
        self.protos: list[TensorProto] = []
        self.linear_bits: dict[str, int] = {}
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

    def plain(self, linear: FusedLinear) -> str:
        """Add a unit's matrix [N, K] in float32."""
        name = f"{linear.name}.weight"
        self._begin(name, np.dtype(np.float32), linear.shape, linear)
        for source in linear.weights:
            for piece in self._checkpoint.chunks(source):
                self._data.append(piece)
                self._stored(piece.size)
        return name

    def plain_transposed(self, linear: FusedLinear) -> str:
        """Add the transpose [K, N] of a unit's matrix in float32; the whole matrix is in memory meanwhile."""
        name = f"{linear.name}.weight"
        self._begin(name, np.dtype(np.float32), linear.shape[::-1], linear)
        matrix = np.concatenate([self._checkpoint.read(source) for source in linear.weights])
        self._data.append(matrix.T)
        self._stored(matrix.size)
        return name

    def quantized(self, linear: FusedLinear, weight_format: WeightFormat) -> StoredMatrix:
        """Add a unit's matrix in blocks along K (see `quantization.codes`), as MatMulNBits takes it.

        Returns:
            Names of the codes, uint8 [N, blocks, block * bits / 8], of the scales, float32 [N, blocks], and of the zero
            points, uint8 [N, ceil(blocks * bits / 8)].
        """
        return self._quantized(linear, weight_format)[0]

    def repaired(
        self, linear: FusedLinear, weight_format: WeightFormat
    ) -> tuple[StoredMatrix, StoredMatrix, StoredMatrix]:
        """Add a unit's matrix as `quantized` does, and the two thin ones whose product repairs it.

        Returns:
            Names for the matrix itself, for the one [rank, K] that inputs meet first, and for the other, [N, rank].
        """
        matrix, rest = self._quantized(linear, weight_format)
        first = rest.factors[0]
        down = self._factor(linear, "down", first.down_codes, first.down_scales)
        codes = np.concatenate([part.up_codes for part in rest.factors])
        scales = np.concatenate([part.up_scales for part in rest.factors])
        return matrix, down, self._factor(linear, "up", codes, scales)

    def _quantized(self, linear: FusedLinear, weight_format: WeightFormat) -> tuple[StoredMatrix, _BesideCodes]:
        codes, rest = self._codes(linear, weight_format)
        points = self._more(linear, "zero_points", rest.points) if weight_format.zero_points else ""
        return StoredMatrix(codes, self._more(linear, "scales", rest.scales), points), rest

    def _factor(self, linear: FusedLinear, name: str, codes: UInt8Array, scales: Float32Array) -> StoredMatrix:
        stored = self._more(linear, f"{name}_codes", codes)
        return StoredMatrix(stored, self._more(linear, f"{name}_scales", scales))

    def gathered(
        self, linear: FusedLinear, weight_format: WeightFormat, product: str = ""
    ) -> tuple[StoredMatrix, StoredMatrix]:
        """Add a unit's matrix in blocks along K, of which GatherBlockQuantized takes rows.

        Args:
            unit: the embedding.
            weight_format: its format.
            product: names the product with the matrix, where that is taken too.

        Returns:
            Names for GatherBlockQuantized: of codes and scales as of `quantized`, though scales are [N, blocks, 1] and
            zero points, if there are any, uint8 of that shape, a byte each. Then those for MatMulNBits, which share the
            bytes of codes and scales; zero points are stored again, packed.
        """
        codes, rest = self._codes(linear, weight_format)
        scales = self._more(linear, "scales", rest.scales[..., None])
        points = packed = ""
        if weight_format.zero_points:
            spread = unpack_zero_points(rest.points, rest.scales.shape[1], weight_format.bits)
            points = self._more(linear, "gathered_zero_points", spread[..., None])
            packed = self._more(linear, "zero_points", rest.points) if product else ""
        flat = self._reshaped(scales, f"{product}.scales", rest.scales.shape) if product else ""
        return StoredMatrix(codes, scales, points), StoredMatrix(codes, flat, packed)

    def quantized_with_offsets(self, linear: FusedLinear, weight_format: WeightFormat) -> tuple[str, str, str, str]:
        """Add a unit's matrix in blocks that have offsets.

        Returns:
            Names of codes and scales as of `quantized`, and of the codes and scales of the matrix of offsets
            [N, blocks], stored in `OFFSETS`.
        """
        codes, rest = self._codes(linear, weight_format)
        rounded, offset_scales = quantize_rows(rest.offsets, OFFSETS)
        self._begin(f"{linear.name}.offset_codes", rounded.dtype, rounded.shape, linear)
        self._data.append(rounded)
        return (
            codes,
            self._more(linear, "scales", rest.scales),
            f"{linear.name}.offset_codes",
            self._more(linear, "offset_scales", offset_scales),
        )

    def _codes(self, linear: FusedLinear, weight_format: WeightFormat) -> tuple[str, _BesideCodes]:
        """Add a unit's codes; returns their name, and what belongs to them."""
        rows, columns = linear.shape
        name = f"{linear.name}.codes"
        self._begin(
            name,
            np.dtype(np.uint8),
            (rows, blocks_of(columns, weight_format), weight_format.block * weight_format.bits // 8),
            linear,
        )
        scales: list[Float32Array] = []
        offsets: list[Float32Array] = []
        points: list[UInt8Array] = []
        factors: list[LowRankFactors] = []
        parts = chain.from_iterable(self._checkpoint.row_ranges(source) for source in linear.weights)
        for piece in in_order(lambda part: self._checkpoint.quantized(part, weight_format), parts):
            self._data.append(piece.packed)
            scales.append(piece.scales)
            offsets.append(np.zeros_like(piece.scales) if piece.offsets is None else piece.offsets)
            if piece.zero_points is not None:
                points.append(piece.zero_points)
            if piece.factors is not None:
                factors.append(piece.factors)
            self._stored(len(piece.packed) * columns)
        all_points = np.concatenate(points) if points else np.empty((0, 0), np.uint8)
        return name, _BesideCodes(np.concatenate(scales), np.concatenate(offsets), all_points, factors)

    def _more(self, linear: FusedLinear, kind: str, value: Float32Array | UInt8Array) -> str:
        """Add what belongs to a unit's codes."""
        name = f"{linear.name}.{kind}"
        self._begin(name, value.dtype, value.shape, linear)
        self._data.append(value)
        return name

    def experts(self, linear: FusedLinear, weight_format: WeightFormat) -> tuple[str, str]:
        """Add a unit's experts, stacked.

        Returns:
            Names of the codes, uint8 [experts, N, K * bits / 8], and of the scales, float32 [experts, N, K / block]; in
            32 bits that of the weights, float32 [experts, N, K], and nothing.
        """
        rows, columns = linear.shape
        stacked = (linear.experts, rows // linear.experts)
        if weight_format.bits == 32:
            name = f"{linear.name}.weight"
            self._begin(name, np.dtype(np.float32), (*stacked, columns), linear)
            for part in self._parts_of_experts(linear):
                weights = _alternating([self._checkpoint.read_rows(each) for each in part])
                self._data.append(weights)
                self._stored(weights.size)
            return name, ""
        codes, scales = f"{linear.name}.codes", f"{linear.name}.scales"
        self._begin(codes, np.dtype(np.uint8), (*stacked, columns * weight_format.bits // 8), linear)
        all_scales = []
        quantized = in_order(
            lambda part: [self._checkpoint.quantized(each, weight_format) for each in part],
            self._parts_of_experts(linear),
        )
        for pieces in quantized:
            packed = _alternating([piece.packed for piece in pieces])
            self._data.append(packed)
            all_scales.append(_alternating([piece.scales for piece in pieces]))
            self._stored(len(packed) * columns)
        self._begin(scales, np.dtype(np.float32), (*stacked, columns // weight_format.block), linear)
        self._data.append(np.concatenate(all_scales))
        return codes, scales

    def _parts_of_experts(self, linear: FusedLinear) -> Iterator[tuple[RowRange, ...]]:
        """Ranges of rows that follow each other in the stack; those of one tuple alternate."""
        together = 2 if linear.interleaved else 1
        for start in range(0, len(linear.weights), together):
            modules = linear.weights[start : start + together]
            yield from zip(*(self._checkpoint.row_ranges(name) for name in modules), strict=True)

    def _reshaped(self, name: str, alias: str, shape: Sequence[int]) -> str:
        """Add a tensor of another shape over the bytes of the initializer `name`."""
        proto = TensorProto()
        proto.CopyFrom(next(proto for proto in self.protos if proto.name == name))
        proto.name = alias
        del proto.dims[:]
        proto.dims.extend(shape)
        self.protos.append(proto)
        return alias

    def _begin(
        self, name: str, dtype: np.dtype[np.generic], shape: Sequence[int], linear: FusedLinear | None = None
    ) -> None:
        length = int(np.prod(shape)) * dtype.itemsize
        if linear is not None:
            self.linear_bits[linear.name] = self.linear_bits.get(linear.name, 0) + 8 * length
        proto = TensorProto(name=name, dims=shape, data_location=TensorProto.EXTERNAL)
        proto.data_type = helper.np_dtype_to_tensor_dtype(dtype)
        offset = self._data.start(length)
        for key, value in (("location", self._data.name), ("offset", offset), ("length", length)):
            proto.external_data.add(key=key, value=str(value))
        self.protos.append(proto)


def _alternating(pieces: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """The first row of each, then the second of each, and so on."""
    return np.stack(pieces, axis=1).reshape(-1, *pieces[0].shape[1:])
