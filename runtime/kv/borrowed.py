"""A KV arena over another arena's buffers, for drafts made of some of the target's layers.

A layer-skip draft uses the target's keys and values of the layers it has. It reads the target's committed slots and
writes after them, where the target's next pass overwrites what it wrote. So the draft needs no prefill of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from .arena import InPlaceArena, KVArena
from .buffers import CacheBuffers, CacheTensorType


class BorrowedArena(KVArena):
    """Some tensors of another arena, the owner, with a length of its own.

    Args:
        tensor_types: types of the draft's cache tensors.
        indices: index of each of these tensors among the owner's.
        limit: largest number of tokens of the context.
    """

    def __init__(self, tensor_types: Sequence[CacheTensorType], indices: Sequence[int], limit: int) -> None:
        super().__init__(tensor_types, limit)
        self._indices = tuple(indices)
        self._owner: Callable[[], InPlaceArena | None] = lambda: None
        self._owners = 0
        """Number of arenas that were borrowed from, one after the other."""

    def borrow(self, owner: InPlaceArena) -> None:
        """Use the tensors of `owner` from now on, without keeping it alive.

        Raises:
            ValueError: they are of other types.
        """
        if [owner.tensor_types[index] for index in self._indices] != list(self.tensor_types):
            raise ValueError(f"the owner's tensors are {owner.tensor_types}, not {self.tensor_types}")
        if self._owner() is not owner:
            self._owner = weakref.ref(owner)
            self._owners += 1
        self.length = owner.length

    def sync_length(self, max_length: int) -> None:
        """Set the length to the owner's, but at most `max_length`: later slots may hold another sequence."""
        self.length = min(self._current_owner().length, max_length)

    @property
    def generation(self) -> tuple[int, int]:
        """What changes whenever the tensors are replaced by others."""
        return self._owners, self._current_owner().generation

    @property
    def buffers(self) -> CacheBuffers:
        """The owner's buffers of these tensors."""
        return self._current_owner().buffers.select(self._indices)

    @property
    def capacity(self) -> int:
        """Number of slots of the owner's buffers."""
        return self._current_owner().capacity

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more slots in the owner's buffers."""
        owner = self._current_owner()
        owner.reserve(self.check_fits(tokens) - owner.length)

    def _current_owner(self) -> InPlaceArena:
        owner = self._owner()
        if owner is None:
            raise ValueError("there is no arena to borrow from")
        return owner
