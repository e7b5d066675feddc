"""The KV arena: buffers that hold the KV cache of one token sequence.

Rewinding moves an integer, and accepting a branch of a token tree is one indexed copy, so a rejected draft costs next
to nothing. The arena uses NumPy only; the session wraps its arrays without copying them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ...errors import ContextError

Array: TypeAlias = npt.NDArray[Any]
CacheSnapshot: TypeAlias = tuple[Array, ...]
"""Copy of cached slots: for every cache tensor type one array `[tensors, ...]`, slots along the type's `axis` + 1."""

_FIRST_CAPACITY: Final = 256


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

    def index(self, slots: slice | npt.NDArray[np.intp]) -> tuple[slice | npt.NDArray[np.intp], ...]:
        """Index of `slots` in one such tensor."""
        return (*[slice(None)] * self.axis, slots)

    def stacked_index(self, slots: slice | npt.NDArray[np.intp]) -> tuple[slice | npt.NDArray[np.intp], ...]:
        """Index of `slots` in a stack of such tensors, `[tensors, *shape]`."""
        return (*[slice(None)] * (self.axis + 1), slots)


class KVArena(ABC):
    """KV cache of one token sequence.

    Slots `0 .. length-1` are committed. Later slots were written by the last pass, and the next pass overwrites them.
    Keys are stored with their rotary positions applied.

    Attributes:
        limit: largest number of tokens of the context.
        tensor_types: types of the graph's cache tensors, in their order.
        groups: indices into `tensor_types` by type, in order of appearance; tensors of one type share an array.
        length: number of committed slots.
        plain_length: number of leading slots that equal those of plain decoding bit for bit: all before the first slot
            that a pass over draft tokens wrote.
        last_prefill: first slot that the last prefill pass of the prompt wrote, and the slot after its last one.
    """

    def __init__(self, tensor_types: Sequence[CacheTensorType], limit: int) -> None:
        if not tensor_types or limit < 1 or any(min(each.shape_of(1)) < 1 for each in tensor_types):
            raise ValueError(f"arena dimensions must be positive: {tensor_types}, {limit}")
        self.limit: Final = limit
        self.tensor_types: Final = tuple(tensor_types)
        self.groups: Final[dict[CacheTensorType, list[int]]] = {}
        for index, tensor_type in enumerate(tensor_types):
            self.groups.setdefault(tensor_type, []).append(index)
        self.length = 0
        self.plain_length = 0
        self.last_prefill = (0, 0)

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Number of slots that fit before the buffers have to grow."""

    @abstractmethod
    def tensors(self) -> list[Array]:
        """The buffer of every cache tensor, in the order of the tensor types."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the buffers."""

    @abstractmethod
    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more slots after the committed ones.

        Raises:
            ContextError: they do not fit the context.
        """

    @property
    @abstractmethod
    def written(self) -> int:
        """Number of slots that may be committed, counted from the first."""

    def commit(self, tokens: int) -> None:
        """Commit the `tokens` slots after the committed ones, which a pass has just written."""
        if not 0 <= tokens <= self.written - self.length:
            raise ValueError(f"cannot commit {tokens} slots at {self.length} of {self.written}")
        if self.plain_length == self.length:
            self.plain_length += tokens
        self.length += tokens

    def rewind_to(self, length: int) -> None:
        """Discard the slots from `length` on; the next pass overwrites them."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot rewind from {self.length} slots to {length}")
        self.length = length
        self.plain_length = min(self.plain_length, length)

    def compact(self, base: int, path: Sequence[int]) -> None:
        """Commit the slots of an accepted tree path, moved to consecutive slots.

        Args:
            base: slot of the tree's anchor, which must be `length`.
            path: ascending node indices of the accepted path, starting with the anchor (0). Afterwards
                `length == base + len(path)`.
        """
        if base != self.length or not path or path[0] != 0 or any(after <= node for node, after in pairwise(path)):
            raise ValueError(f"path {list(path)} at {base} does not start a branch at slot {self.length}")
        if base + path[-1] >= self.written:
            raise ValueError(f"path {list(path)} leaves the arena of {self.written} slots")
        if path[-1] >= len(path):
            nodes = np.asarray(path, np.intp)
            moved = np.flatnonzero(nodes != np.arange(nodes.size))
            self._move(base + nodes[moved], base + moved)
        self.length = base + len(path)

    def pad_to(self, length: int, value: float) -> None:
        """Commit slots filled with `value` up to `length`, to time passes at a context length.

        Raises:
            ContextError: they do not fit the context.
        """
        self.reserve(length - self.length)
        self._resize(length)
        for tensor, tensor_type in zip(self.tensors(), self.tensor_types, strict=True):
            tensor[tensor_type.index(slice(self.length, length))] = value
        self.length = length

    def snapshot(self) -> CacheSnapshot:
        """Copy the committed slots."""
        tensors = self.tensors()
        return tuple(
            np.stack([tensors[member][tensor_type.index(slice(self.length))] for member in members])
            for tensor_type, members in self.groups.items()
        )

    def restore(self, snapshot: CacheSnapshot) -> None:
        """Replace the committed slots by those of a `snapshot`.

        Raises:
            ValueError: the snapshot is of a model with other cache tensors.
            ContextError: it holds more slots than the context allows.
        """
        if len(snapshot) != len(self.groups):
            raise ValueError(f"expected a snapshot of {len(self.groups)} types of tensors, found {len(snapshot)}")
        axis = next(iter(self.groups)).axis + 1
        slots = snapshot[0].shape[axis] if snapshot[0].ndim > axis else 0
        for array, (tensor_type, members) in zip(snapshot, self.groups.items(), strict=True):
            expected = (len(members), *tensor_type.shape_of(slots))
            if array.shape != expected or array.dtype != tensor_type.dtype:
                raise ValueError(
                    f"expected {tensor_type.dtype} slots {list(expected)}, found {array.dtype} {list(array.shape)}"
                )
        self.length = 0
        self.reserve(slots)
        self._resize(slots)
        tensors = self.tensors()
        for stack, (tensor_type, members) in zip(snapshot, self.groups.items(), strict=True):
            for member, new in zip(members, stack, strict=True):
                tensors[member][tensor_type.index(slice(slots))] = new
        self.length = self.plain_length = slots

    def copy_from(self, source: KVArena, slots: int) -> None:
        """Replace the committed slots by the first `slots` of another arena of the same tensor types.

        Raises:
            ContextError: they do not fit the context.
        """
        if source.tensor_types != self.tensor_types or not 0 <= slots <= source.length:
            raise ValueError(f"cannot copy {slots} of {source.length} slots of {source.tensor_types}")
        self.length = 0
        self.reserve(slots)
        self._resize(slots)
        for tensor, other, tensor_type in zip(self.tensors(), source.tensors(), self.tensor_types, strict=True):
            index = tensor_type.index(slice(slots))
            tensor[index] = other[index]
        self.length = slots
        self.plain_length = min(source.plain_length, slots)

    def check_fits(self, tokens: int) -> int:
        """The length that `tokens` more slots would give.

        Raises:
            ContextError: it exceeds the context.
        """
        needed = self.length + tokens
        if needed > self.limit:
            raise ContextError(
                f"context full: {needed} of {self.limit} tokens", "shorten the conversation or give a longer --context"
            )
        return needed

    def _resize(self, slots: int) -> None:  # noqa: B027 -- only growing tensors have no free slots
        """Give the tensors `slots` slots; there is room for them."""

    def _move(self, sources: npt.NDArray[np.intp], targets: npt.NDArray[np.intp]) -> None:
        """Copy slots of all tensors to other slots, as if all were read before any is written."""
        for tensor, tensor_type in zip(self.tensors(), self.tensor_types, strict=True):
            # The right-hand side is gathered before anything is written, so overlapping slots are safe.
            tensor[tensor_type.index(targets)] = tensor[tensor_type.index(sources)]


class InPlaceArena(KVArena):
    """An arena whose tensors the graph extends in place: past and present are one buffer of `capacity` slots.

    Args:
        tensor_types: types of the graph's cache tensors.
        limit: largest number of tokens of the context.
        capacity: number of slots if the graph fixes it; otherwise the buffers grow.

    Attributes:
        data: for every tensor type an array `[tensors, *shape]`. Growing replaces the arrays.
        generation: number of replacements, so that holders of slices know when to take new ones.
    """

    def __init__(self, tensor_types: Sequence[CacheTensorType], limit: int, capacity: int | None = None) -> None:
        super().__init__(tensor_types, limit if capacity is None else min(limit, capacity))
        self.generation = 0
        self._capacity = min(_FIRST_CAPACITY, limit) if capacity is None else capacity
        self.data: CacheSnapshot = self._empty()

    @property
    def capacity(self) -> int:
        """See `KVArena.capacity`."""
        return self._capacity

    @property
    def written(self) -> int:
        """See `KVArena.written`."""
        return self._capacity

    @property
    def nbytes(self) -> int:
        """See `KVArena.nbytes`."""
        return sum(array.nbytes for array in self.data)

    def tensors(self) -> list[Array]:
        """See `KVArena.tensors`."""
        buffers: dict[int, Array] = {}
        for array, members in zip(self.data, self.groups.values(), strict=True):
            buffers.update(zip(members, array, strict=True))
        return [buffers[index] for index in range(len(buffers))]

    def reserve(self, tokens: int) -> None:
        """See `KVArena.reserve`. The capacity doubles up to the limit."""
        needed = self.length + tokens
        if needed <= self._capacity and needed <= self.limit:
            return
        self.check_fits(tokens)
        while self._capacity < needed:
            self._capacity *= 2
        self._capacity = min(self._capacity, self.limit)
        grown = self._empty()
        for new, old, tensor_type in zip(grown, self.data, self.groups, strict=True):
            # Slots after the committed ones may hold what a `BorrowedArena` wrote, so all are copied.
            new[tensor_type.stacked_index(slice(old.shape[tensor_type.axis + 1]))] = old
        self.data = grown
        self.generation += 1

    def _empty(self) -> CacheSnapshot:
        return tuple(
            np.zeros((len(members), *tensor_type.shape_of(self._capacity)), tensor_type.dtype)
            for tensor_type, members in self.groups.items()
        )

    def _move(self, sources: npt.NDArray[np.intp], targets: npt.NDArray[np.intp]) -> None:
        # One indexed copy per type is faster than one per tensor.
        for array, tensor_type in zip(self.data, self.groups, strict=True):
            array[tensor_type.stacked_index(targets)] = array[tensor_type.stacked_index(sources)]
