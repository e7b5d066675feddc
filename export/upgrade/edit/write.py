"""Where the tensors of an edited graph go: into a new weight file, or back to where they lie, for a model in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
from onnx import NodeProto, TensorProto, helper

from ...graph.weight_file import WeightFile
from .tensors import Computed, FileRange, Source, Tensor

_INLINE_BELOW: Final = 1024
"""Tensors smaller than this stay in the .onnx file itself, where shape inference can see them."""


@dataclass(frozen=True)
class Stored:
    """A tensor as the new model refers to it."""

    tensor: TensorProto
    cast: NodeProto | None = None
    """What makes the tensor's value of it where it was stored in another type."""


class TensorWriter(Protocol):
    """Puts tensors somewhere and says where."""

    def store(self, name: str, tensor: Tensor) -> Stored:
        """Put a tensor that is to be known by `name`."""
        ...


class ToFile:
    """Streams tensors into a weight file, one after the other; those with the same source are written once."""

    def __init__(self, data: WeightFile, stored: Callable[[int], None]) -> None:
        """`stored` hears the number of bytes just written."""
        self._data = data
        self._stored = stored
        self._places: dict[Source, int] = {}

    def store(self, name: str, tensor: Tensor) -> Stored:
        """Write the tensor, unless it is small.

        Raises:
            OSError: the disk refused a write, or the source cannot be read.
        """
        if tensor.nbytes < _INLINE_BELOW:
            return Stored(_inline(name, tensor))
        if tensor.source not in self._places:
            self._places[tensor.source] = self._data.start(tensor.nbytes)
            for piece in tensor.source.pieces():
                self._data.append(piece)
                self._stored(piece.nbytes)
        return Stored(_external(name, tensor, self._data.name, self._places[tensor.source]))


class InPlace:
    """Leaves tensors in the files of the source model, which are then named by their paths within its folder; whatever
    is not there goes into the model itself."""

    def store(self, name: str, tensor: Tensor) -> Stored:
        """Refer to the tensor's place, or take its bytes."""
        source = tensor.source
        if isinstance(source, FileRange) and tensor.nbytes >= _INLINE_BELOW:
            return Stored(_external(name, tensor, source.location, source.offset))
        if isinstance(source, Computed) and source.widens is not None and tensor.nbytes >= _INLINE_BELOW:
            kept = self.store(f"{name}.stored", replace(source.widens, shape=tensor.shape)).tensor
            return Stored(kept, helper.make_node("Cast", [kept.name], [name], to=tensor.element_type))
        return Stored(_inline(name, tensor))


def _inline(name: str, tensor: Tensor) -> TensorProto:
    proto = TensorProto(name=name, dims=tensor.shape, data_type=tensor.element_type)
    proto.raw_data = np.ascontiguousarray(tensor.source.read()).tobytes()
    return proto


def _external(name: str, tensor: Tensor, location: str, offset: int) -> TensorProto:
    proto = TensorProto(name=name, dims=tensor.shape, data_type=tensor.element_type, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", tensor.nbytes)):
        proto.external_data.add(key=key, value=str(value))
    return proto
