"""The KV arena of graphs with fixed shapes: buffers of one of a few capacities."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from .arena import KVArena
from .buffers import Array, CacheTensorType, NumpyBuffers, StackedBuffers

_SHRINK_AT: Final = 2
"""A smaller capacity is used again once the sequence would fill at most one part in this many of it, so that a sequence
whose end moves back and forth keeps its capacity."""


class StaticArena(KVArena):
    """An arena whose number of slots is always one for which there is a graph.

    The capacity is the smallest that holds the committed slots and those of the next pass, so it moves up as the text
    grows (length-adaptive compilation of FlightLLM, Zeng et al. 2024). Changing it copies the slots to new buffers. A
    pass returns the slots of its new tokens, which `write` stores behind the committed ones.

    Args:
        tensor_types: types of the graph's cache tensors.
        limit: largest number of tokens of the context.
        capacities: numbers of slots for which there are graphs, ascending.

    Attributes:
        generation: number of times that the buffers were replaced, so that their users know when to take new ones.
    """

    def __init__(self, tensor_types: Sequence[CacheTensorType], limit: int, capacities: Sequence[int]) -> None:
        super().__init__(tensor_types, min(limit, capacities[-1]))
        self.generation = 0
        self._capacities: Final = tuple(capacities)
        self._capacity = self._capacities[0]
        self._buffers: NumpyBuffers = StackedBuffers(self.tensor_types, self._capacity)

    @property
    def capacity(self) -> int:
        """See `KVArena.capacity`."""
        return self._capacity

    @property
    def buffers(self) -> NumpyBuffers:
        """See `KVArena.buffers`."""
        return self._buffers

    @property
    def written(self) -> int:
        """See `KVArena.written`."""
        return min(self._capacity, self.limit)

    def reserve(self, tokens: int) -> None:
        """See `KVArena.reserve`."""
        needed = self.check_fits(tokens)
        if needed > self._capacity:
            self._change_capacity(self._smallest(needed))
        elif needed * _SHRINK_AT < self._capacity:
            self._change_capacity(self._smallest(needed * _SHRINK_AT))

    def write(self, slot: int, new: Sequence[Array], count: int) -> None:
        """Store the slots that a pass returned for its first `count` tokens.

        Args:
            slot: the first slot to write.
            new: for every cache tensor an array of the pass's tokens, in the order of the tensor types.
            count: number of slots to write.
        """
        for array, added, tensor_type in zip(self._buffers.arrays, new, self.tensor_types, strict=True):
            array[tensor_type.index(slice(slot, slot + count))] = added[tensor_type.index(slice(count))]

    def _smallest(self, needed: int) -> int:
        """The smallest capacity of at least `needed` slots, or the largest."""
        return self._capacities[min(bisect_left(self._capacities, needed), len(self._capacities) - 1)]

    def _change_capacity(self, capacity: int) -> None:
        """Move the committed slots to buffers of another capacity, if it is another one."""
        if capacity == self._capacity:
            return
        changed = StackedBuffers(self.tensor_types, capacity)
        changed.copy(self._buffers, self.length)
        self._capacity, self._buffers = capacity, changed
        self.generation += 1
