"""KV caches of sequences that wait, in 8 bits: a quarter of the memory, and nearly the same values.

Every channel of every tensor has a scale with which its largest value in this sequence becomes the largest code, so
nothing saturates. Caches are restored before they are used, and what follows is computed in floats
(docs/decisions/0094-parked-caches.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .arena import KVArena
from .buffers import Array, CacheSnapshot, CacheTensorType
from .cache_scales import MAX_CODE


@dataclass(frozen=True, eq=False)
class ParkedCache:
    """The slots of an arena in 8 bits."""

    codes: CacheSnapshot
    """int8 slots, arranged as in a snapshot of an arena."""
    scales: CacheSnapshot
    """float32 scales of each of these arrays, with one slot."""
    states: CacheSnapshot = ()
    """What a snapshot has behind its slots, unchanged."""

    @classmethod
    def of(cls, arena: KVArena) -> ParkedCache:
        """The committed slots of an arena whose tensors hold floats."""
        snapshot, count = arena.snapshot(), len(arena.groups)
        axes = [tensor_type.axis + 1 for tensor_type in arena.groups]
        pairs = [codes_of(*each) for each in zip(snapshot[:count], axes, strict=True)]
        codes, scales = zip(*pairs, strict=True)
        return cls(codes, scales, snapshot[count:])

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(each.nbytes for each in (*self.codes, *self.scales, *self.states))

    @property
    def values(self) -> CacheSnapshot:
        """A snapshot with the float32 values of the codes."""
        return (*(codes * scales for codes, scales in zip(self.codes, self.scales, strict=True)), *self.states)

    def restored(self, new_arena: Callable[[], KVArena]) -> KVArena:
        """A new arena with the values, of which no slot counts as plain decoding's."""
        arena = new_arena()
        arena.restore(self.values)
        arena.plain_length = 0
        return arena


def can_park(types: Sequence[CacheTensorType]) -> bool:
    """Whether tensors of these types hold floats."""
    return all(each.dtype.kind == "f" for each in types)


def codes_of(slots: Array, axis: int) -> tuple[Array, Array]:
    """int8 codes of float slots along an axis, and their float32 scales, with a size of 1 along it."""
    largest = np.abs(slots).max(axis=axis, keepdims=True, initial=0.0)
    scales = (np.where(largest > 0, largest, 1.0) / MAX_CODE).astype(np.float32)
    return np.rint(slots / scales).astype(np.int8), scales
