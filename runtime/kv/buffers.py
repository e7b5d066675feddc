"""Buffers of cache tensors, and what arenas do with the slots in them.

Arenas know which slots hold what; buffers move, fill and copy them. `NumpyBuffers` are arrays of this process, which a
session wraps without copying them. `DeviceBuffers` lie in a device's memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from ..graph.memory import drop_array_pages

Array: TypeAlias = npt.NDArray[Any]
Slots: TypeAlias = npt.NDArray[np.intp]
"""Indices of slots, `[n]`."""
CacheSnapshot: TypeAlias = tuple[Array, ...]
"""Copy of cached slots: for every cache tensor type one array `[tensors, ...]`, slots along the type's `axis` + 1."""


@dataclass(frozen=True)
class CacheTensorType:
    """Element type and shape of a cache tensor; dimension `axis` counts slots, and its size in `shape` is ignored."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    axis: int

    def shape_of(self, slots: int) -> tuple[int, ...]:
        """The shape of a tensor with that many slots."""
        return (*self.shape[: self.axis], slots, *self.shape[self.axis + 1 :])

    @property
    def slot_bytes(self) -> int:
        """Bytes per slot."""
        return int(np.prod(self.shape_of(1))) * self.dtype.itemsize

    def index(self, slots: slice | Slots) -> tuple[slice | Slots, ...]:
        """Index of `slots` in one such tensor."""
        return (*[slice(None)] * self.axis, slots)

    def stacked_index(self, slots: slice | Slots) -> tuple[slice | Slots, ...]:
        """Index of `slots` in a stack of such tensors, `[tensors, *shape]`."""
        return (slice(None), *self.index(slots))


def grouped(tensor_types: Sequence[CacheTensorType]) -> dict[CacheTensorType, list[int]]:
    """Indices into `tensor_types` by type, in order of appearance."""
    groups: dict[CacheTensorType, list[int]] = {}
    for index, tensor_type in enumerate(tensor_types):
        groups.setdefault(tensor_type, []).append(index)
    return groups


class CacheBuffers(ABC):
    """Buffers of cache tensors, in the order of `tensor_types`.

    Attributes:
        tensor_types: types of the tensors.
        groups: indices into `tensor_types` by type, see `grouped`.
        doubled_up_to: number of slots up to which an arena doubles them when it grows; beyond, it grows by an eighth.
    """

    doubled_up_to: ClassVar[int]

    def __init__(self, tensor_types: Sequence[CacheTensorType]) -> None:
        self.tensor_types: Final = tuple(tensor_types)
        self.groups: Final = grouped(tensor_types)

    @abstractmethod
    def resized(self, slots: int) -> CacheBuffers:
        """New buffers of another number of slots that begin with these slots; further ones hold zeros.

        These slots are moved: what the old buffers hold afterwards is undefined.
        """

    @abstractmethod
    def move(self, sources: Slots, targets: Slots) -> None:
        """Copy slots of all tensors to other slots, as if all were read before any is written."""

    @abstractmethod
    def fill(self, start: int, stop: int, value: float) -> None:
        """Set the slots from `start` up to `stop` to `value`; what slots after them hold is undefined afterwards."""

    @abstractmethod
    def read(self, slots: int) -> CacheSnapshot:
        """Copy the first slots."""

    @abstractmethod
    def write(self, snapshot: CacheSnapshot, slots: int) -> None:
        """Set the first `slots` slots to those of a snapshot, whose shapes fit; see `fill` for later ones."""

    def copy(self, source: CacheBuffers, slots: int) -> None:
        """Set the first slots to those of buffers of the same types; see `fill` for later ones."""
        self.write(source.read(slots), slots)


class NumpyBuffers(CacheBuffers):
    """Buffers that are NumPy arrays.

    Args:
        tensor_types: types of the tensors.
        arrays: the array of each tensor, with any number of slots.
    """

    doubled_up_to = 2048
    """Memory is not held for a context twice as long, and attention that runs over the whole capacity has little to
    skip (runtime/long_context)."""

    def __init__(self, tensor_types: Sequence[CacheTensorType], arrays: Sequence[Array]) -> None:
        super().__init__(tensor_types)
        self.arrays: Final = tuple(arrays)

    def from_slot(self, index: int, first: int) -> Array:
        """The array of a tensor as if slot `first` were its first one. Its last `first` slots lie beyond the tensor's
        own memory and must not be touched."""
        array, tensor_type = self.arrays[index], self.tensor_types[index]
        return as_strided(array[tensor_type.index(slice(first, None))], array.shape, array.strides) if first else array

    def resized(self, slots: int) -> NumpyBuffers:
        """New arrays that begin with these slots; the memory of each old one is free once it was copied."""
        changed = StackedBuffers(self.tensor_types, slots)
        for new, old, tensor_type in zip(changed.arrays, self.arrays, self.tensor_types, strict=True):
            index = tensor_type.index(slice(min(slots, old.shape[tensor_type.axis])))
            new[index] = old[index]
            drop_array_pages(old)
        return changed

    def move(self, sources: Slots, targets: Slots) -> None:
        """Copy slots to other slots of the same arrays."""
        for array, tensor_type in zip(self.arrays, self.tensor_types, strict=True):
            # The right-hand side is gathered before anything is written, so overlapping slots are safe.
            array[tensor_type.index(targets)] = array[tensor_type.index(sources)]

    def fill(self, start: int, stop: int, value: float) -> None:
        """Set slots to one value; later slots stay as they are."""
        for array, tensor_type in zip(self.arrays, self.tensor_types, strict=True):
            array[tensor_type.index(slice(start, stop))] = value

    def read(self, slots: int) -> CacheSnapshot:
        """Copy the first slots to one array for each type."""
        return tuple(
            np.stack([self.arrays[member][tensor_type.index(slice(slots))] for member in members])
            for tensor_type, members in self.groups.items()
        )

    def write(self, snapshot: CacheSnapshot, slots: int) -> None:
        """Set the first slots to those of a snapshot."""
        for stack, (tensor_type, members) in zip(snapshot, self.groups.items(), strict=True):
            for member, new in zip(members, stack, strict=True):
                self.arrays[member][tensor_type.index(slice(slots))] = new

    def write_new(self, slot: int, new: Sequence[Array], count: int) -> None:
        """Set `count` slots from `slot` on to the first slots of `new`, an array for every tensor."""
        for array, added, tensor_type in zip(self.arrays, new, self.tensor_types, strict=True):
            array[tensor_type.index(slice(slot, slot + count))] = added[tensor_type.index(slice(count))]

    def copy(self, source: CacheBuffers, slots: int) -> None:
        """Set the first slots to those of other buffers, without a snapshot in between where these are arrays too."""
        if isinstance(source, NumpyBuffers):
            self.write_new(0, source.arrays, slots)
        else:
            super().copy(source, slots)


class StackedBuffers(NumpyBuffers):
    """NumPy buffers in which all tensors of one type are slices of one array, of a given number of slots."""

    def __init__(self, tensor_types: Sequence[CacheTensorType], slots: int) -> None:
        groups = grouped(tensor_types)
        self._stacks: Final = tuple(np.zeros((len(groups[each]), *each.shape_of(slots)), each.dtype) for each in groups)
        arrays: dict[int, Array] = {}
        for stack, members in zip(self._stacks, groups.values(), strict=True):
            arrays.update(zip(members, stack, strict=True))
        super().__init__(tensor_types, [arrays[index] for index in range(len(arrays))])

    def move(self, sources: Slots, targets: Slots) -> None:
        """Copy slots to other slots: one indexed copy for each type is faster than one for each tensor."""
        for stack, tensor_type in zip(self._stacks, self.groups, strict=True):
            stack[tensor_type.stacked_index(targets)] = stack[tensor_type.stacked_index(sources)]
