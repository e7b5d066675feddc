"""Drops slots from the middle of a cache, and rotates the keys after them to their new positions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np

from ...errors import EdgeError
from ..kv.arena import KVArena
from ..kv.buffers import NumpyBuffers
from ..kv.hybrid_arena import HybridArena
from ..kv.key_rotation import KeyRotation
from .bound_graph import BoundGraph
from .graph_io import GraphIO

_CHECK_TOKENS: Final = 9
_CHECK_TOLERANCE: Final = 0.01
"""Largest difference of a key from the one that it must equal, relative to the largest key. Activations in 8 bits
change keys by less, wrong rotations by about as much as the keys."""


class CacheShift:
    """Drops slots of one model's caches.

    Args:
        graph: the model's file, which has the rotary tables.
        graph_io: its inputs and outputs.
        new_arena: makes an empty arena.
    """

    def __init__(self, graph: Path, graph_io: GraphIO, new_arena: Callable[[], KVArena]) -> None:
        self._graph = graph
        self._graph_io = graph_io
        self._new_arena = new_arena
        self._checked: bool | None = None

    def drop(self, bound: BoundGraph, first: int, stop: int) -> bool:
        """Drop the slots from `first` up to `stop`; those after them move to consecutive positions.

        Returns:
            False where that is not possible, because the cache is not of float32 in this process, or the graph's
            rotation is not known; the cache is as before then, and the slots have to be computed.
        """
        arena = bound.arena
        if not self._is_possible(arena) or not self._is_correct(bound):
            return False
        self._drop(arena, first, stop)
        return True

    def _drop(self, arena: KVArena, first: int, stop: int) -> None:
        length = arena.length
        arena.buffers.move(np.arange(stop, length), np.arange(first, first + length - stop))
        arena.rewind_to(first + length - stop)
        arena.plain_length = min(arena.plain_length, first)
        arena.last_prefill = (0, 0)
        for index, rotation in enumerate(self._rotations):
            if rotation is not None:
                buffers = arena.buffers
                assert isinstance(buffers, NumpyBuffers)  # noqa: S101  `_is_possible`
                axis = arena.tensor_types[index].axis
                keys = buffers.arrays[index][(*[slice(None)] * axis, slice(first, arena.length))]
                rotation.rotate_back(keys, stop - first)

    def _is_possible(self, arena: KVArena) -> bool:
        """Whether the slots lie in this process's memory as they were computed."""
        # States of convolutions would have to be computed anew, and with them all that they led to.
        kept = isinstance(arena.buffers, NumpyBuffers) and not isinstance(arena, HybridArena)
        return kept and all(
            each.dtype == np.float32 and len(each.shape) == 4 and each.axis == 2 for each in arena.tensor_types
        )

    def _is_correct(self, bound: BoundGraph) -> bool:
        """Whether dropping slots gives the keys of their new positions, found out once.

        In a text that repeats one token every key is that of the first position, rotated: attention over equal values
        gives that value. So after slots in the middle were dropped, the keys must be those that were there before.
        """
        if self._checked is None:
            arena, sequence_arena = self._new_arena(), bound.arena
            bound.use(arena)
            try:
                bound.forward([self._graph_io.input_vocab // 2] * _CHECK_TOKENS, logits_for=(_CHECK_TOKENS - 1,))
                arena.commit(_CHECK_TOKENS)
                before = arena.snapshot()
                self._drop(arena, 2, 5)
                kept = arena.length
                self._checked = all(
                    np.abs(new - old[..., :kept, :]).max() <= _CHECK_TOLERANCE * np.abs(old).max()
                    for new, old in zip(arena.snapshot(), before, strict=True)
                )
            except (EdgeError, ValueError):
                self._checked = False
            finally:
                bound.use(sequence_arena)
        return self._checked

    @cached_property
    def _rotations(self) -> tuple[KeyRotation | None, ...]:
        """The rotation of every cache tensor; None for values, and for keys of whose rotation nothing is known."""
        from .rotary_tables import key_rotations  # noqa: PLC0415 -- importing protobuf takes 28 ms

        found = key_rotations(self._graph)
        return tuple(found.get(tensor.past) for tensor in self._graph_io.cache)
