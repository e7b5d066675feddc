"""Writers of tensors: into a new weight file, or as references to source files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
from onnx import NodeProto, TensorProto, helper

from ...graph.weight_file import WeightFile
from .tensors import Computed, FileRange, Source, Tensor

_INLINE_BELOW: Final = 1024
"""Tensors of fewer bytes stay in the .onnx file itself, where shape inference can see them."""


@dataclass(frozen=True)
class Stored:
    """A tensor as the new model refers to it."""

    tensor: TensorProto
    cast: NodeProto | None = None
    """Converts the stored tensor to the type that the graph reads, if they differ."""


class TensorWriter(Protocol):
    """Stores tensors and says where."""

    def store(self, name: str, tensor: Tensor) -> Stored:
        """Store a tensor that the graph knows by `name`."""
        ...


class ToFile:
    """Streams tensors into a weight file one by one. Tensors with the same source are written once."""

    def __init__(self, data: WeightFile, on_written: Callable[[int], None]) -> None:
        """Write to `data`; `on_written` is called with the number of bytes after each piece."""
        self._data = data
        self._on_written = on_written
        self._offsets: dict[Source, int] = {}

    def store(self, name: str, tensor: Tensor) -> Stored:
        """Write the tensor; a small one is stored in the model instead.

        Raises:
            OSError: the disk refused a write, or the source cannot be read.
        """
        if tensor.nbytes < _INLINE_BELOW:
            return Stored(_inline(name, tensor))
        if tensor.source not in self._offsets:
            self._offsets[tensor.source] = self._data.start(tensor.nbytes)
            for piece in tensor.source.pieces():
                self._data.append(piece)
                self._on_written(piece.nbytes)
        return Stored(_external(name, tensor, self._data.name, self._offsets[tensor.source]))


class InPlace:
    """Refers to tensors in the files of the source model by their paths within its folder.

    Tensors that are not in a file are stored in the model itself.
    """

    def store(self, name: str, tensor: Tensor) -> Stored:
        """Refer to the tensor in its file, or store its bytes in the model."""
        source = tensor.source
        if isinstance(source, FileRange) and tensor.nbytes >= _INLINE_BELOW:
            return Stored(_external(name, tensor, source.location, source.offset))
        if isinstance(source, Computed) and source.widens is not None and tensor.nbytes >= _INLINE_BELOW:
            kept = self.store(f"{name}.stored", replace(source.widens, shape=tensor.shape)).tensor
            return Stored(kept, helper.make_node("Cast", [kept.name], [name], to=tensor.element_type))
        return Stored(_inline(name, tensor))


class KeepingFile:
    """Refers to the tensors in one file of the source model, and has another writer store all others."""

    def __init__(self, location: str, others: TensorWriter) -> None:
        """Keep tensors in the file `location`, a path within the source model's folder."""
        self._location = location
        self._others = others
        self._kept = InPlace()

    def store(self, name: str, tensor: Tensor) -> Stored:
        """Refer to the tensor in the kept file, or store it.

        Raises:
            OSError: the disk refused a write, or the source cannot be read.
        """
        is_kept = isinstance(tensor.source, FileRange) and tensor.source.location == self._location
        return (self._kept if is_kept else self._others).store(name, tensor)


def _inline(name: str, tensor: Tensor) -> TensorProto:
    proto = TensorProto(name=name, dims=tensor.shape, data_type=tensor.element_type)
    proto.raw_data = np.ascontiguousarray(tensor.source.read()).tobytes()
    return proto


def _external(name: str, tensor: Tensor, location: str, offset: int) -> TensorProto:
    proto = TensorProto(name=name, dims=tensor.shape, data_type=tensor.element_type, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", tensor.nbytes)):
        proto.external_data.add(key=key, value=str(value))
    return proto
