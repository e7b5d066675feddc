"""Constant tensors of a graph under edit: type, shape, and where their bytes lie or come from.

A tensor's bytes are one of:

- `FileRange`: a range of a file of the source model. Read through a memory map, copied to the new file in pieces.
- `InMemory`: a NumPy array (what stood inside the source .onnx file, or what a pass computed and is small).
- `Computed`: pieces that a pass makes when the new file is written (a matrix being quantized).

Bytes are little-endian and packed as ONNX stores them: two 4-bit values a byte, the first in the low bits.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper, numpy_helper

from ....errors import BundleError

Array = npt.NDArray[Any]

_PIECE: Final = 4 << 20
_FOUR_BITS: Final[Mapping[int, bool]] = {TensorProto.UINT4: False, TensorProto.INT4: True}
"""Types of which two share a byte, and whether they are signed."""


@dataclass(frozen=True)
class FileRange:
    """Bytes of a file; two that lie at the same place are the same."""

    folder: Path
    location: str
    """The file's path within the folder, as the source model names it."""
    offset: int
    length: int

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / self.location

    def pieces(self) -> Iterator[Array]:
        """The bytes, uint8, a few MiB at a time.

        Raises:
            BundleError: the file cannot be read, or became shorter.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                left = self.length
                while left:
                    piece = file.read(min(left, _PIECE))
                    if not piece:
                        raise BundleError(f"{self.path} became shorter while it was read", "leave it alone meanwhile")
                    left -= len(piece)
                    yield np.frombuffer(piece, np.uint8)
        except OSError as error:
            raise BundleError(f"{self.path} cannot be read: {error.strerror or error}", "check the disk") from error

    def read(self) -> Array:
        """The bytes, uint8 [length], mapped and not copied; read-only."""
        if not self.length:
            return np.empty(0, np.uint8)
        start = self.offset - self.offset % mmap.ALLOCATIONGRANULARITY
        with self.path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), self.offset - start + self.length, access=mmap.ACCESS_READ, offset=start)
        return np.frombuffer(mapped, np.uint8, self.length, self.offset - start)


@dataclass(frozen=True, eq=False)
class InMemory:
    """Bytes that are in memory already."""

    data: Array
    """uint8 [length]"""

    @property
    def length(self) -> int:
        """Bytes."""
        return self.data.size

    def pieces(self) -> Iterator[Array]:
        """The bytes in one piece."""
        yield self.data

    def read(self) -> Array:
        """The bytes, uint8 [length]."""
        return self.data


@dataclass(frozen=True, eq=False)
class Computed:
    """Bytes that are made when they are asked for."""

    length: int
    make: Callable[[], Iterable[Array]]
    """Yields contiguous arrays of any type, whose bytes joined are the tensor; called once a write-out, in the order in
    which the tensors were added to the graph."""
    widens: Tensor | None = None
    """The tensor of another type whose values these are in float32, where they are that."""

    def pieces(self) -> Iterator[Array]:
        """What `make` yields."""
        yield from self.make()

    def read(self) -> Array:
        """All of it at once, uint8 [length]."""
        pieces = [np.ascontiguousarray(piece).reshape(-1).view(np.uint8) for piece in self.make()]
        return np.concatenate(pieces) if pieces else np.empty(0, np.uint8)


Source = FileRange | InMemory | Computed


@dataclass(frozen=True, eq=False)
class Tensor:
    """A constant of the graph. Two tensors with the same `source` share their bytes in the written file."""

    element_type: int
    """As in `TensorProto.DataType`."""
    shape: tuple[int, ...]
    source: Source

    @classmethod
    def of(cls, value: Array) -> Tensor:
        """A tensor of an array that is in memory."""
        value = np.ascontiguousarray(value)
        data = value.reshape(-1).view(np.uint8) if value.size else np.empty(0, np.uint8)
        return cls(helper.np_dtype_to_tensor_dtype(value.dtype), value.shape, InMemory(data))

    @classmethod
    def computed(cls, dtype: npt.DTypeLike, shape: tuple[int, ...], make: Callable[[], Iterable[Array]]) -> Tensor:
        """A tensor whose pieces are made at write-out (see `Computed`)."""
        kind = np.dtype(dtype)
        return cls(helper.np_dtype_to_tensor_dtype(kind), shape, Computed(int(np.prod(shape)) * kind.itemsize, make))

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return self.source.length

    def reshaped(self, *shape: int) -> Tensor:
        """The same bytes under another shape."""
        return replace(self, shape=shape)

    def array(self) -> Array:
        """The elements as NumPy, in `shape`; mapped and read-only where they lie in a file.

        Types of 4 bits come unpacked as int8 or uint8; bfloat16 and the 8-bit floats as `ml_dtypes` types.
        """
        data = self.source.read()
        if self.element_type in _FOUR_BITS:
            values = np.stack([data & 15, data >> 4], axis=-1).reshape(-1)[: self.size]
            if _FOUR_BITS[self.element_type]:
                values = (values.astype(np.int8) ^ 8) - 8
            return values.reshape(self.shape)
        return data.view(helper.tensor_dtype_to_np_dtype(self.element_type)).reshape(self.shape)


def read_tensor(proto: TensorProto, folder: Path) -> Tensor:
    """A tensor of a model; its bytes stay where they are.

    Raises:
        BundleError: it lies beyond the end of its file, has not as many bytes as its shape asks for, or has a type
            that edge-run does not edit (text).
    """
    shape = tuple(proto.dims)
    if proto.data_location == TensorProto.EXTERNAL:
        entries = {entry.key: entry.value for entry in proto.external_data}
        location = entries.get("location", "")
        try:
            size = (folder / location).stat().st_size
            offset = int(entries.get("offset") or 0)
            length = int(entries["length"]) if entries.get("length") else _bytes_of(proto.data_type, shape, proto.name)
        except ValueError as error:
            raise _damaged(proto.name, "an offset that is no number") from error
        if offset < 0 or length < 0 or offset + length > size:
            raise _damaged(proto.name, f"bytes beyond the end of {location}")
        source: Source = FileRange(folder, location, offset, length)
    else:
        try:
            data = proto.raw_data or numpy_helper.from_array(numpy_helper.to_array(proto)).raw_data
        except Exception as error:  # the library raises many kinds
            raise _damaged(proto.name, str(error)) from error
        source = InMemory(np.frombuffer(data, np.uint8))
    if any(extent < 0 for extent in shape) or source.length != _bytes_of(proto.data_type, shape, proto.name):
        raise _damaged(proto.name, f"{source.length} bytes, which is not what its shape {list(shape)} takes")
    return Tensor(proto.data_type, shape, source)


def _bytes_of(element_type: int, shape: tuple[int, ...], name: str) -> int:
    count = 1
    for extent in shape:
        count *= extent
    if element_type in _FOUR_BITS:
        return (count + 1) // 2
    try:
        kind = helper.tensor_dtype_to_np_dtype(element_type)
    except (KeyError, ValueError) as error:
        raise _damaged(name, f"the unknown type {element_type}") from error
    if kind.hasobject:
        raise BundleError(f"the model keeps text in the constant {name}", "such a model cannot be upgraded")
    return count * kind.itemsize


def _damaged(name: str, what: str) -> BundleError:
    return BundleError(f"the model's constant {name} is damaged: it has {what}", "copy the whole model again")
