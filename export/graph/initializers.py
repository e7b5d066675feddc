"""The graph's initializers, converted and streamed to the external data file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, TensorProto, helper, numpy_helper

from ...models.manifest import FileDigest, WeightFormat
from ..checkpoint.layer_weights import FusedLinear
from ..checkpoint.source import Float32Array, ModelSource, QuantizedRows, RowRange, UInt8Array, in_order, joined_rows
from ..quantization.codes import OFFSETS, blocks_of, kernel_bits, nearest_rows, stored_codes, unpack_zero_points

INLINE_BELOW: Final = 1024
"""Smaller constants, in bytes, are stored in the .onnx file itself, where shape inference can see them."""

HALF_SCALES: Final = "half_scales"
"""Last part of the name of scales that are stored in float16."""
_MAPPED_FROM: Final = 1 << 20
_MAP_ALIGNMENT: Final = 1 << 16
"""Windows maps files at multiples of 64 KiB; pages of other systems divide it."""
_SMALL_ALIGNMENT: Final = 64


class StoredMatrix(NamedTuple):
    """Names of the initializers of a quantized matrix."""

    codes: str
    scales: str
    zero_points: str = ""
    """Empty where the format has none."""

    def inputs(self, bias: str = "") -> list[str]:
        """The inputs of MatMulNBits after the activations."""
        inputs = [self.codes, self.scales, self.zero_points, "", bias]
        while not inputs[-1]:
            inputs.pop()
        return inputs


class Initializers:
    """The initializers so far. All but the smallest are written to the data file at once.

    Methods add an initializer and return its name. They raise CheckpointError when a tensor cannot be read and OSError
    when the disk refuses a write.
    """

    def __init__(self, checkpoint: ModelSource, data: WeightFile, report_weights: Callable[[int], None]) -> None:
        """`report_weights` is called with the number of weights just written."""
        self.protos: list[TensorProto] = []
        self.conversions: list[NodeProto] = []
        """Nodes that convert what is stored in float16 to float32; ONNX Runtime folds them when it loads the graph."""
        self.linear_bits: dict[str, int] = {}
        """Stored bits by linear, including scales and padding; a shared matrix counts once."""
        self._checkpoint = checkpoint
        self._data = data
        self._report_weights = report_weights

    def constant(self, name: str, value: npt.NDArray[np.generic]) -> str:
        """Add an array."""
        if value.nbytes >= INLINE_BELOW:
            return self._store(name, value)
        self.protos.append(numpy_helper.from_array(value, name))
        return name

    def vector(self, name: str, sources: Sequence[str], plus: float = 0.0) -> str:
        """Add concatenated checkpoint vectors (norms, biases) in float32; `plus` is added to each element."""
        value = np.concatenate([self._checkpoint.read(source) for source in sources])
        return self.constant(name, value + np.float32(plus) if plus else value)

    def taps(self, name: str, source: str, kernel: int) -> list[str]:
        """Add the kernels `[channels, 1, kernel]` of a convolution, as one vector of float32 for each of its tokens."""
        kernels = self._checkpoint.read(source)
        return [self.constant(f"{name}.{tap}", np.ascontiguousarray(kernels[:, 0, tap])) for tap in range(kernel)]

    def float32(self, linear: FusedLinear) -> str:
        """Add the matrix [N, K] of a linear in float32."""
        name = f"{linear.name}.weight"
        self._begin(name, np.dtype(np.float32), linear.shape, linear)
        for source in linear.weights:
            for chunk in self._checkpoint.chunks(source):
                self._data.append(chunk)
                self._report_weights(chunk.size)
        return name

    def float32_transposed(self, linear: FusedLinear, *, half: bool = False) -> str:
        """Add the transposed matrix [K, N] of a linear in float32, or stored in `half` of the bytes.

        The whole matrix is in memory meanwhile. Returns the name of the matrix in float32.
        """
        matrix = np.concatenate([self._checkpoint.read(source) for source in linear.weights]).T
        self._report_weights(matrix.size)
        if not half:
            return self._store(f"{linear.name}.weight", matrix, linear)
        largest = np.finfo(np.float16).max  # a larger weight would be stored as infinity
        return self._as_float32(
            self._store(f"{linear.name}.half_weight", matrix.clip(-largest, largest).astype(np.float16), linear)
        )

    def quantized(self, linear: FusedLinear, weight_format: WeightFormat) -> StoredMatrix:
        """Add the quantized matrix of a linear in the layout of MatMulNBits (see `quantization.codes`).

        Returns:
            Names of codes, uint8 [N, blocks, block * bits / 8], scales, float32 [N, blocks], and zero points,
            uint8 [N, ceil(blocks * bits / 8)]. Scales may be stored in float16: then the name is that of the converted
            ones.
        """
        name, quantized = self._codes(linear, weight_format)
        points = "" if quantized.zero_points is None else self._add(linear, "zero_points", quantized.zero_points)
        scales = quantized.scales * np.float32(2.0 ** (weight_format.bits - kernel_bits(weight_format.bits)))
        return StoredMatrix(name, self._add_scales(linear, scales, weight_format), points)

    def gathered(
        self, linear: FusedLinear, weight_format: WeightFormat, head: str = ""
    ) -> tuple[StoredMatrix, StoredMatrix]:
        """Add the quantized embedding in the layout of GatherBlockQuantized.

        Args:
            linear: the embedding.
            weight_format: its format.
            head: name of a tied LM head; empty for none.

        Returns:
            Names for GatherBlockQuantized, as from `quantized` but with scales [N, blocks, 1] and unpacked zero
            points of that shape, uint8. Then names for the MatMulNBits of the head, which share the bytes of codes and
            scales; zero points are stored once more, packed.
        """
        codes, quantized = self._codes(linear, weight_format)
        blocks = quantized.scales.shape
        scales = self._add_scales(linear, quantized.scales[..., None], weight_format)
        zero_points = packed = flat = ""
        if quantized.zero_points is not None:
            unpacked = unpack_zero_points(quantized.zero_points, blocks[1], weight_format.bits)
            zero_points = self._add(linear, "gathered_zero_points", unpacked[..., None])
            packed = self._add(linear, "zero_points", quantized.zero_points) if head else ""
        if head:
            kind = HALF_SCALES if weight_format.half_scales else "scales"
            alias = TensorProto()  # with the same bytes
            alias.CopyFrom(next(proto for proto in self.protos if proto.name == f"{linear.name}.{kind}"))
            alias.name, alias.dims[:] = f"{head}.{kind}", blocks
            self.protos.append(alias)
            flat = self._as_float32(alias.name)
        return StoredMatrix(codes, scales, zero_points), StoredMatrix(codes, flat, packed)

    def quantized_with_offsets(self, linear: FusedLinear, weight_format: WeightFormat) -> tuple[str, str, str, str]:
        """Add the quantized matrix of a linear with offsets.

        Returns:
            Names of codes and scales as in `quantized`, and of codes and scales of the offsets [N, blocks] in the
            format `OFFSETS`.
        """
        codes, quantized = self._codes(linear, weight_format)
        assert quantized.offsets is not None  # noqa: S101 -- the format has offsets
        offsets = nearest_rows(quantized.offsets, OFFSETS)
        offset_codes = self._add(linear, "offset_codes", offsets.packed)
        scales = self._add(linear, "scales", quantized.scales)
        return codes, scales, offset_codes, self._add(linear, "offset_scales", offsets.scales)

    def _codes(self, linear: FusedLinear, weight_format: WeightFormat) -> tuple[str, QuantizedRows]:
        """Add the codes of a linear; returns their name, and all that a quantized matrix has besides."""
        rows, columns = linear.shape
        name = f"{linear.name}.codes"
        block_bytes = weight_format.block * weight_format.bits // 8
        self._begin(name, np.dtype(np.uint8), (rows, blocks_of(columns, weight_format), block_bytes), linear)
        parts = []
        row_ranges = chain.from_iterable(self._checkpoint.row_ranges(source) for source in linear.weights)
        for part in in_order(lambda rows: self._checkpoint.quantized(rows, weight_format), row_ranges):
            self._data.append(stored_codes(part.packed, weight_format.bits))
            offsets = np.zeros_like(part.scales) if part.offsets is None and weight_format.offsets else part.offsets
            parts.append(part._replace(packed=np.empty(0, np.uint8), offsets=offsets))
            self._report_weights(len(part.packed) * columns)
        return name, joined_rows(parts)

    def _add(self, linear: FusedLinear, kind: str, value: Float32Array | npt.NDArray[np.float16] | UInt8Array) -> str:
        """Add an array that belongs to a linear."""
        return self._store(f"{linear.name}.{kind}", value, linear)

    def _add_scales(self, linear: FusedLinear, scales: Float32Array, weight_format: WeightFormat) -> str:
        """Add the scales of a linear, in float16 if the format says so; returns the name of the float32 scales."""
        if not weight_format.half_scales:
            return self._add(linear, "scales", scales)
        return self._as_float32(self._add(linear, HALF_SCALES, scales.astype(np.float16)))

    def _as_float32(self, stored: str) -> str:
        """The name of scales or weights in float32, for the name of those that are stored."""
        name = stored.replace(".half_", ".")
        if name != stored:
            self.conversions.append(helper.make_node("Cast", [stored], [name], name=name, to=TensorProto.FLOAT))
        return name

    def experts(self, linear: FusedLinear, weight_format: WeightFormat) -> tuple[str, str]:
        """Add the stacked experts of a linear.

        Returns:
            Names of codes, uint8 [experts, N, K * bits / 8], and scales, float32 [experts, N, K / block]; in float32,
            the name of the weights [experts, N, K] and "".
        """
        rows, columns = linear.shape
        stacked = (linear.experts, rows // linear.experts)
        if weight_format.bits == 32:
            name = f"{linear.name}.weight"
            self._begin(name, np.dtype(np.float32), (*stacked, columns), linear)
            for part in self._expert_rows(linear):
                weights = _alternating([self._checkpoint.read_rows(each) for each in part])
                self._data.append(weights)
                self._report_weights(weights.size)
            return name, ""
        codes = f"{linear.name}.codes"
        self._begin(codes, np.dtype(np.uint8), (*stacked, columns * weight_format.bits // 8), linear)
        all_scales = []
        quantized = in_order(
            lambda part: [self._checkpoint.quantized(each, weight_format) for each in part],
            self._expert_rows(linear),
        )
        for parts in quantized:
            packed = _alternating([part.packed for part in parts])
            self._data.append(packed)
            all_scales.append(_alternating([part.scales for part in parts]))
            self._report_weights(len(packed) * columns)
        return codes, self._add(linear, "scales", np.concatenate(all_scales).reshape(*stacked, -1))

    def _expert_rows(self, linear: FusedLinear) -> Iterator[tuple[RowRange, ...]]:
        """Yield the row ranges of the stack in order; the rows of one tuple alternate."""
        alternating = 2 if linear.interleaved else 1
        for start in range(0, len(linear.weights), alternating):
            modules = linear.weights[start : start + alternating]
            yield from zip(*(self._checkpoint.row_ranges(name) for name in modules), strict=True)

    def _store(self, name: str, value: npt.NDArray[Any], linear: FusedLinear | None = None) -> str:
        self._begin(name, value.dtype, value.shape, linear)
        self._data.append(value)
        return name

    def _begin(
        self, name: str, dtype: np.dtype[np.generic], shape: Sequence[int], linear: FusedLinear | None = None
    ) -> None:
        if linear is not None:
            bits = 8 * int(np.prod(shape)) * dtype.itemsize
            self.linear_bits[linear.name] = self.linear_bits.get(linear.name, 0) + bits
        self.protos.append(self._data.begin(name, dtype, shape))


def _alternating(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Interleave the rows of several arrays: the first row of each, then the second of each, and so on."""
    return np.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:])


def external_tensor(
    name: str, element_type: int, shape: Sequence[int], location: str, offset: int, length: int
) -> TensorProto:
    """An initializer whose bytes are in another file."""
    proto = TensorProto(name=name, dims=shape, data_type=element_type, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        proto.external_data.add(key=key, value=str(value))
    return proto


class WeightFile(AbstractContextManager["WeightFile"]):
    """Appends tensors to the file; a context manager. Methods raise OSError when the disk refuses a write."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._file = path.open("wb", buffering=0)
        self._sha = hashlib.sha256()
        self._size = 0

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def start(self, length: int) -> int:
        """Align the file for a tensor of that many bytes and return its offset; call `append` for its bytes."""
        alignment = _MAP_ALIGNMENT if length >= _MAPPED_FROM else _SMALL_ALIGNMENT
        self._write(memoryview(bytes(-self._size % alignment)))
        return self._size

    def begin(self, name: str, dtype: np.dtype[Any], shape: Sequence[int]) -> TensorProto:
        """Return the initializer of a tensor whose bytes are appended next."""
        length = int(np.prod(shape)) * dtype.itemsize
        element_type = helper.np_dtype_to_tensor_dtype(dtype)
        return external_tensor(name, element_type, shape, self.name, self.start(length), length)

    def append(self, part: npt.NDArray[np.generic]) -> None:
        """Write the next bytes of the current tensor."""
        self._write(np.ascontiguousarray(part).data.cast("B"))

    def digest(self) -> FileDigest:
        """Size and SHA-256 of the bytes written so far."""
        return FileDigest(self._size, self._sha.hexdigest())

    def _write(self, view: memoryview) -> None:
        self._sha.update(view)
        self._size += len(view)
        while view:  # an unbuffered write may be partial
            view = view[self._file.write(view) or 0 :]
