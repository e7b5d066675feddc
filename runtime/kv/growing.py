"""A KV arena for graphs that return a longer cache: `present` is `past` plus the new slots.

Every tensor has two buffers that are swapped after every pass: the graph reads the past from one and writes the present
into the other. Such a tensor has no free slots, so after a rewind the remaining slots are copied to a new layout before
the next pass, which costs about as much as the graph's own copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

import numpy as np

from .arena import KVArena
from .buffers import Array, CacheTensorType, NumpyBuffers
from .state_buffers import StateType

_FIRST_CAPACITY: Final = 64


class GrowingArena(KVArena):
    """An arena with two buffers per tensor; `past` and `present` are the arrays of the next pass."""

    def __init__(
        self, tensor_types: Sequence[CacheTensorType], limit: int, state_types: Sequence[StateType] = ()
    ) -> None:
        super().__init__(tensor_types, limit, state_types)
        self._capacity = min(_FIRST_CAPACITY, limit)
        self._slots = 0
        """Number of slots of the tensors in their current layout."""
        self._past, self._spare = self._new_buffers(), self._new_buffers()

    @property
    def capacity(self) -> int:
        """Number of slots that fit the buffers."""
        return self._capacity

    @property
    def committable(self) -> int:
        """Number of slots up to which slots may be committed: there are no others."""
        return self._slots if self.states is None else super().committable

    @property
    def nbytes(self) -> int:
        """Bytes of the slots, of the spare buffers, and of the features and states beside them."""
        return super().nbytes + self._capacity * self.slot_bytes

    @property
    def buffers(self) -> NumpyBuffers:
        """The past of every tensor, without the spare buffers."""
        return NumpyBuffers(self.tensor_types, self._views(self._past, self._slots))

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more slots; the capacity doubles up to the limit."""
        needed = self.check_fits(tokens)
        if needed <= self._capacity:
            return
        before = self.buffers
        while self._capacity < needed:
            self._capacity *= 2
        self._capacity = min(self._capacity, self.limit)
        self._past = self._new_buffers()
        self.buffers.copy(before, self._slots)
        self._spare = self._new_buffers()

    def past(self) -> list[Array]:
        """The committed slots, as the graph's inputs."""
        if self._slots != self.length:
            self._resize(self.length)
        return self._views(self._past, self.length)

    def present(self, tokens: int) -> list[Array]:
        """Arrays for the graph's outputs: the committed slots and `tokens` new ones; see `finish_pass`."""
        return self._views(self._spare, self.length + tokens)

    def finish_pass(self, tokens: int) -> None:
        """Swap the buffers after the graph has written `present(tokens)`."""
        self._past, self._spare = self._spare, self._past
        self._slots = self.length + tokens

    def _new_buffers(self) -> list[Array]:
        return [np.zeros(prod(each.shape_of(self._capacity)), each.dtype) for each in self.tensor_types]

    def _views(self, buffers: Sequence[Array], slots: int) -> list[Array]:
        """The beginnings of flat buffers as tensors of that many slots."""
        shapes = [each.shape_of(slots) for each in self.tensor_types]
        return [buffer[: prod(shape)].reshape(shape) for buffer, shape in zip(buffers, shapes, strict=True)]

    def _resize(self, slots: int) -> None:
        """Give the tensors `slots` slots; the content of additional ones is undefined."""
        before, kept = self.buffers, min(slots, self._slots)
        self._past, self._spare, self._slots = self._spare, self._past, slots
        self.buffers.copy(before, kept)
