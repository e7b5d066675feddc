"""Parts of an edited graph: its nodes and its constant tensors.

A tensor's bytes are either a range of a file of the source model (`FileRange`), which is read through a memory map and
copied in pieces, or made on demand (`Computed`): values that are in memory already, or a matrix that is rounded while
the new file is written.

Bytes are little-endian and packed as ONNX stores them: two 4-bit values per byte, the first in the low bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from ...errors import BundleError
from ...models.onnx_file.wire import check_external_data
from ...models.regular_file import os_errors_as
from ..graph.initializers import INLINE_BELOW, WeightFile, external_tensor

Array = npt.NDArray[Any]

FLOATS: Final = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)

_PIECE: Final = 4 << 20
_FOUR_BITS: Final[Mapping[int, bool]] = {TensorProto.UINT4: False, TensorProto.INT4: True}
"""Element types with two elements per byte, and whether they are signed."""
_CONSTANT_TYPES: Final = {
    **dict.fromkeys(("value_int", "value_ints"), "int64"),
    **dict.fromkeys(("value_float", "value_floats"), "float32"),
}


@dataclass(frozen=True)
class FileRange:
    """A range of bytes of a file. Equal ranges are the same bytes."""

    folder: Path
    location: str
    """Path of the file within the folder, as the source model names it."""
    offset: int
    length: int

    def pieces(self) -> Iterator[Array]:
        """Yield the bytes, uint8, a few MiB at a time.

        Raises:
            BundleError: the file cannot be read, or shrank meanwhile.
        """
        path = self.folder / self.location
        with os_errors_as(BundleError, f"{path} cannot be read", "check the disk"), path.open("rb") as file:
            file.seek(self.offset)
            for start in range(0, self.length, _PIECE):
                piece = np.fromfile(file, np.uint8, min(self.length - start, _PIECE))
                if not piece.size:
                    raise BundleError(f"{path} shrank while it was read", "do not change the model meanwhile")
                yield piece

    def read(self) -> Array:
        """Map the bytes without copying them, uint8 [length], read-only."""
        if not self.length:
            return np.empty(0, np.uint8)
        return np.memmap(self.folder / self.location, np.uint8, "r", self.offset, (self.length,))


@dataclass(frozen=True, eq=False)
class Computed:
    """Bytes that are in memory, or computed on demand."""

    length: int
    pieces: Callable[[], Iterable[Array]]
    """Yields contiguous arrays of any type whose concatenated bytes are the tensor. Called once per written model, in
    the order in which tensors were added to the graph."""
    widens: Tensor | None = None
    """The half-precision tensor that this is the float32 copy of, if it is one."""

    def read(self) -> Array:
        """Return all bytes at once, uint8 [length]."""
        pieces = [np.ascontiguousarray(piece).reshape(-1).view(np.uint8) for piece in self.pieces()]
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.uint8), *pieces])


Source = FileRange | Computed


@dataclass(frozen=True, eq=False)
class Tensor:
    """A constant of the graph. Tensors with the same `source` share their bytes in the written file."""

    element_type: int
    """A `TensorProto.DataType`."""
    shape: tuple[int, ...]
    source: Source

    @classmethod
    def of(cls, value: Array) -> Tensor:
        """Wrap an array."""
        value = np.ascontiguousarray(value)
        source = Computed(value.nbytes, lambda: [value.reshape(-1)] if value.size else [])
        return cls(helper.np_dtype_to_tensor_dtype(value.dtype), value.shape, source)

    @classmethod
    def computed(cls, dtype: npt.DTypeLike, shape: tuple[int, ...], make: Callable[[], Iterable[Array]]) -> Tensor:
        """Declare a tensor whose bytes are computed when it is written (see `Computed`)."""
        dtype = np.dtype(dtype)
        return cls(helper.np_dtype_to_tensor_dtype(dtype), shape, Computed(math.prod(shape) * dtype.itemsize, make))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of stored bytes."""
        return self.source.length

    def reshaped(self, *shape: int) -> Tensor:
        """Return a tensor of the same bytes with another shape."""
        return replace(self, shape=shape)

    def array(self) -> Array:
        """Return the elements as a NumPy array of `shape`, mapped read-only if they are in a file.

        4-bit types are unpacked to int8 or uint8; bfloat16 and 8-bit floats are `ml_dtypes` types.
        """
        data = self.source.read()
        if self.element_type in _FOUR_BITS:
            values = np.stack([data & 15, data >> 4], axis=-1).reshape(-1)[: self.size]
            if _FOUR_BITS[self.element_type]:
                values = (values.astype(np.int8) ^ 8) - 8
            return values.reshape(self.shape)
        return data.view(helper.tensor_dtype_to_np_dtype(self.element_type)).reshape(self.shape)


def read_model(path: Path) -> ModelProto:
    """Read an .onnx file without its external weights.

    Raises:
        BundleError: the file is not an ONNX model, or its weights are missing.
    """
    try:
        with os_errors_as(BundleError, f"{path} cannot be read", "check its permissions"):
            check_external_data(path)
            return onnx.load(path, load_external_data=False)
    except DecodeError as error:
        raise BundleError(f"{path} is not an ONNX model", "give a complete .onnx file") from error


def read_tensor(proto: TensorProto, folder: Path) -> Tensor:
    """Describe a tensor of a model without reading its bytes.

    Raises:
        BundleError: its bytes are beyond the end of their file, do not match its shape, or are strings.
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
            raise _damaged(proto.name, "an offset or length that is not a number") from error
        if offset < 0 or length < 0 or offset + length > size:
            raise _damaged(proto.name, f"bytes beyond the end of {location}")
        source: Source = FileRange(folder, location, offset, length)
    else:
        try:
            data = proto.raw_data or numpy_helper.from_array(numpy_helper.to_array(proto)).raw_data
        except Exception as error:  # the library raises many kinds
            raise _damaged(proto.name, str(error)) from error
        source = Computed(len(data), lambda: [np.frombuffer(data, np.uint8)])
    if any(extent < 0 for extent in shape) or source.length != _bytes_of(proto.data_type, shape, proto.name):
        raise _damaged(proto.name, f"{source.length} bytes, which does not match its shape {list(shape)}")
    return Tensor(proto.data_type, shape, source)


Store = Callable[[str, Tensor], tuple[TensorProto, NodeProto | None]]
"""Stores the tensor that a graph knows by a name. Returns it as the new model refers to it, and, where that has another
type than the graph reads, the node that converts it."""


def in_place(name: str, tensor: Tensor) -> tuple[TensorProto, NodeProto | None]:
    """Refer to a tensor in its file of the source model, or store its bytes in the model if it is in none."""
    source = tensor.source
    if tensor.nbytes >= INLINE_BELOW:
        if isinstance(source, FileRange):
            return external_tensor(
                name, tensor.element_type, tensor.shape, source.location, source.offset, tensor.nbytes
            ), None
        if source.widens is not None:
            kept, _ = in_place(f"{name}.stored", source.widens.reshaped(*tensor.shape))
            return kept, helper.make_node("Cast", [kept.name], [name], to=tensor.element_type)
    data = np.ascontiguousarray(source.read()).tobytes()
    return TensorProto(name=name, dims=tensor.shape, data_type=tensor.element_type, raw_data=data), None


def to_file(data: WeightFile, on_written: Callable[[int], None] = lambda _: None, kept: str = "") -> Store:
    """Stream tensors into a weight file one by one, and store small ones in the model.

    Tensors with the same source are written once; tensors in the file `kept` remain there. `on_written` is called with
    the number of bytes after each piece.
    """
    offsets: dict[Source, int] = {}

    def store(name: str, tensor: Tensor) -> tuple[TensorProto, NodeProto | None]:
        is_kept = isinstance(tensor.source, FileRange) and tensor.source.location == kept
        if is_kept or tensor.nbytes < INLINE_BELOW:
            return in_place(name, tensor)
        if tensor.source not in offsets:
            offsets[tensor.source] = data.start(tensor.nbytes)
            for piece in tensor.source.pieces():
                data.append(piece)
                on_written(piece.nbytes)
        offset = offsets[tensor.source]
        return external_tensor(name, tensor.element_type, tensor.shape, data.name, offset, tensor.nbytes), None

    return store


def _bytes_of(element_type: int, shape: tuple[int, ...], name: str) -> int:
    count = math.prod(shape)
    if element_type in _FOUR_BITS:
        return (count + 1) // 2
    try:
        dtype = helper.tensor_dtype_to_np_dtype(element_type)
    except (KeyError, ValueError) as error:
        raise _damaged(name, f"the unknown type {element_type}") from error
    if dtype.hasobject:
        raise BundleError(f"the constant {name} of the model holds strings", "such a model cannot be upgraded")
    return count * dtype.itemsize


def unsupported(what: str) -> BundleError:
    """The error for a model that cannot be upgraded, but that the runtime may open."""
    return BundleError(what, "run it as it is")


def _damaged(name: str, what: str) -> BundleError:
    return BundleError(f"the model's constant {name} is damaged: it has {what}", "copy the whole model again")


class Node:
    """One operator call. Its fields may be read; its inputs are changed through the graph."""

    __slots__ = ("attributes", "captured", "domain", "inputs", "name", "op", "outputs")

    def __init__(self, proto: NodeProto) -> None:
        self.op = proto.op_type
        self.domain = "" if proto.domain == "ai.onnx" else proto.domain
        self.name = proto.name
        self.inputs: tuple[str, ...] = tuple(proto.input)
        self.outputs: tuple[str, ...] = tuple(proto.output)
        self.attributes = {attribute.name: attribute for attribute in proto.attribute}
        self.captured: tuple[str, ...] = tuple(sorted(_captured(proto)))

    def input(self, index: int) -> str:
        """Name of an input; "" if it is absent."""
        return self.inputs[index] if index < len(self.inputs) else ""

    def output(self, index: int) -> str:
        """Name of an output; "" if it is absent."""
        return self.outputs[index] if index < len(self.outputs) else ""

    def attribute(self, name: str, default: Any = None) -> Any:
        """Value of an attribute: int, float, str, list, TensorProto or GraphProto."""
        proto = self.attributes.get(name)
        if proto is None:
            return default
        value = helper.get_attribute_value(proto)
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

    def proto(self) -> NodeProto:
        """Return the node as an ONNX message."""
        return NodeProto(
            op_type=self.op,
            domain=self.domain,
            name=self.name,
            input=self.inputs,
            output=self.outputs,
            attribute=self.attributes.values(),
        )

    def reads(self) -> Iterator[str]:
        """Names of the values that the node and its branches read."""
        yield from (name for name in self.inputs if name)
        yield from self.captured


def constant_of(proto: NodeProto, folder: Path) -> Tensor:
    """The value of a Constant node.

    Raises:
        BundleError: it is of a type that cannot be read.
    """
    for attribute in proto.attribute:
        if attribute.name == "value":
            return read_tensor(attribute.t, folder)
        if attribute.name in _CONSTANT_TYPES:
            return Tensor.of(np.array(helper.get_attribute_value(attribute), _CONSTANT_TYPES[attribute.name]))
    raise BundleError(
        f"the model's constant {proto.output[0]} has an unsupported type", "such a model cannot be upgraded"
    )


def _captured(proto: NodeProto) -> set[str]:
    """Names that the branches of a node read from the enclosing graph."""
    found: set[str] = set()
    for attribute in proto.attribute:
        for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            made = {each.name for each in graph.input} | {each.name for each in graph.initializer}
            made.update(name for node in graph.node for name in node.output)
            read = {name for node in graph.node for name in (*node.input, *_captured(node)) if name}
            found |= (read | {each.name for each in graph.output}) - made
    return found
