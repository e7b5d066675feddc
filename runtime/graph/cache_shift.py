"""Drops slots from the middle of a cache, and rotates the keys after them to their new positions.

Keys are cached with their rotary positions applied. Rotating a pair of channels by one angle and then by another equals
rotating it by the sum, so a key at position p becomes the one of position p - d by a rotation by -d, exact up to the
rounding of floats. Whatever scaling the frequencies have, its cosines and sines at d are in the tables of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...errors import EdgeError
from ...models.onnx_file.graph_editor import CannotRewriteError, GraphEditor
from ..kv.arena import KVArena
from ..kv.buffers import NumpyBuffers
from .attention_edits import OPERATOR, PAST_KEY, rotated_halves, rotation_of
from .bound_graph import BoundGraph
from .graph_io import GraphIO

_CHECK_TOKENS: Final = 9
_CHECK_TOLERANCE: Final = 0.01
"""Largest difference of a key from the one that it must equal, relative to the largest key. Activations in 8 bits
change keys by less, wrong rotations by about as much as the keys."""
_MAX_GRAPH_BYTES: Final = 256 << 20
"""Largest file that is read for its tables: one with its weights inside is not worth the memory."""
_NORM_TOLERANCE = 1e-3
"""Largest difference of the norm of a table's cosine and sine, which is 1 but for rounding."""


@dataclass(eq=False)
class CacheShift:
    """Drops slots of one model's caches."""

    graph: Path
    """The model's file, which has the rotary tables."""
    graph_io: GraphIO
    new_arena: Callable[[], KVArena]
    """Makes an empty arena."""
    _checked: bool | None = field(init=False, default=None)
    """Whether dropping slots gives the right keys; None before that was found out."""

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
        kept = isinstance(arena.buffers, NumpyBuffers) and arena.states is None
        return kept and all(
            each.dtype == np.float32 and len(each.shape) == 4 and each.axis == 2 for each in arena.tensor_types
        )

    def _is_correct(self, bound: BoundGraph) -> bool:
        """Whether dropping slots gives the keys of their new positions, found out once.

        In a text that repeats one token every key is the first one, rotated: attention over equal values
        gives that value. So after slots in the middle were dropped, the keys must be those that were there before.
        """
        if self._checked is None:
            arena, sequence_arena, shares_passes = self.new_arena(), bound.arena, bound.shares_passes
            bound.use(arena)
            bound.shares_passes = False
            try:
                bound.forward([self.graph_io.input_vocab // 2] * _CHECK_TOKENS, logits_for=(_CHECK_TOKENS - 1,))
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
                bound.shares_passes = shares_passes
        return self._checked

    @cached_property
    def _rotations(self) -> tuple[KeyRotation | None, ...]:
        """The rotation of every cache tensor; None for values, and for keys of whose rotation nothing is known."""
        found: Mapping[str, KeyRotation] = {}
        # A graph that cannot be read, or that rotates without tables, has no rotation that is known.
        with suppress(CannotRewriteError, EdgeError, OSError, ValueError):
            if self.graph.stat().st_size <= _MAX_GRAPH_BYTES:
                found = _rotations(GraphEditor(self.graph))
        return tuple(found.get(tensor.past) for tensor in self.graph_io.cache)


def _rotations(editor: GraphEditor) -> Mapping[str, KeyRotation]:
    """The rotations of a graph's keys, inside the attention operators or in front of them, by the name of the cache."""
    found: dict[str, KeyRotation] = {}
    for node in editor.graph.node:
        if node.op_type == OPERATOR and (rotation := rotation_of(editor, node)) is not None:
            cosines, sines = (editor.array(name) for name in rotation.tables)
            if cosines is not None and sines is not None:
                found[node.input[PAST_KEY]] = KeyRotation(cosines, sines, rotation.interleaved)
    return found


@dataclass(frozen=True, eq=False)
class KeyRotation:
    """The rotary tables of the keys of a layer."""

    cosines: npt.NDArray[Any]
    """`[positions, channels / 2]`; an attention factor may have multiplied both tables."""
    sines: npt.NDArray[Any]
    interleaved: bool = False
    """Whether the channels of a pair are neighbours; if not, the second half of the channels follows the first."""

    def at(self, position: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Cosine and sine of every pair at a position, float64 `[channels / 2]`, without the attention factor.

        Raises:
            ValueError: the tables do not have the position, or do not belong to a rotation.
        """
        if not 0 <= position < len(self.cosines) or self.cosines.shape != self.sines.shape:
            raise ValueError(f"the rotary tables have no position {position}")
        cosines, sines = (np.asarray(table[position], np.float64) for table in (self.cosines, self.sines))
        factor = np.asarray(self.cosines[0], np.float64)  # the cosine of 0 is 1
        with np.errstate(divide="ignore", invalid="ignore"):
            cosines, sines = cosines / factor, sines / factor
            norms = np.hypot(cosines, sines)
        if not (np.abs(norms - 1) < _NORM_TOLERANCE).all():
            raise ValueError("the rotary tables are not those of a rotation")
        return cosines / norms, sines / norms

    def rotate_back(self, keys: npt.NDArray[Any], positions: int) -> None:
        """Rotate cached keys `[..., channels]` in place to positions that are so much smaller.

        Channels after those that the tables have are not rotated.

        Raises:
            ValueError: as for `at`, or the keys have fewer channels.
        """
        cosines, sines = (values.astype(np.float32) for values in self.at(positions))
        channels = 2 * cosines.size
        if keys.shape[-1] < channels:
            raise ValueError(f"the rotary tables rotate {channels} of {keys.shape[-1]} channels")
        first, second = (keys[..., half] for half in rotated_halves(channels, interleaved=self.interleaved))
        rotated = first * cosines + second * sines
        second[...] = second * cosines - first * sines
        first[...] = rotated
