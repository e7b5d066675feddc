"""The KV arena: buffers that hold the KV cache of one token sequence.

Rewinding moves an integer, and accepting a branch of a token tree is one indexed copy, so a rejected draft costs next
to nothing. What holds the slots is in `buffers.py`, what holds states of layers without attention in `layer_states.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from ...errors import ContextError
from .buffers import Array, CacheBuffers, CacheSnapshot, CacheTensorType, StackedBuffers, grouped
from .features import FeatureSlots
from .layer_states import LayerStates
from .state_buffers import StateType

_FIRST_CAPACITY: Final = 256
_STEP: Final = 128
_SHRINK_AT: Final = 2
"""A smaller fixed capacity is used again once the sequence would fill at most one part in this many of it, so that a
sequence whose end moves back and forth keeps its capacity."""


class KVArena(ABC):
    """KV cache of one token sequence.

    Slots `0 .. length-1` are committed. Later slots were written by the last pass, and the next pass overwrites them.
    Keys are stored with their rotary positions applied.

    Args:
        tensor_types: types of the graph's cache tensors.
        limit: largest number of tokens of the context.
        state_types: types of the states of layers without attention.

    Attributes:
        limit: largest number of tokens of the context.
        tensor_types: types of the graph's cache tensors, in their order.
        groups: indices into `tensor_types` by type, in order of appearance.
        slot_bytes: bytes of one slot of all tensors.
        length: number of committed slots.
        plain_length: number of leading slots that equal those of plain decoding bit for bit: all that prefill or passes
            over one token wrote in the model's own graph, before the first one of a draft pass or of a further graph.
        last_prefill: first slot that the last prefill pass of the prompt wrote, and the slot after its last one.
        is_plain: whether the graph of plain decoding wrote the slots that are not committed yet.
        features: the target's hidden states at the tokens of the slots, for a draft head; None for none.
        states: states of layers without attention; None for a model with attention alone.
        replayed: number of tokens that have run once more since the arena was made, inside passes over others.
    """

    def __init__(
        self, tensor_types: Sequence[CacheTensorType], limit: int, state_types: Sequence[StateType] = ()
    ) -> None:
        self.limit: Final = limit
        self.tensor_types: Final = tuple(tensor_types)
        self.groups: Final = grouped(tensor_types)
        self.length = 0
        self.plain_length = 0
        self.last_prefill = (0, 0)
        self.is_plain = True
        self.features: FeatureSlots | None = None
        self.slot_bytes: Final = sum(each.slot_bytes for each in tensor_types)
        self.states: Final = LayerStates(state_types, self.slot_bytes) if state_types else None
        self.replayed = 0

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Number of slots that fit before the buffers have to grow."""

    @property
    @abstractmethod
    def buffers(self) -> CacheBuffers:
        """The buffers of the cache tensors, in the order of the tensor types."""

    @property
    def nbytes(self) -> int:
        """Bytes of the slots, and of the features and states beside them."""
        beside = [each.nbytes for each in (self.features, self.states) if each is not None]
        return self.capacity * self.slot_bytes + sum(beside)

    @abstractmethod
    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more slots after the committed ones.

        Raises:
            ContextError: they do not fit the context.
        """

    def expect(self, tokens: int) -> None:  # noqa: B027 -- only buffers that are replaced when they grow gain by it
        """Prepare for `tokens` more slots after the committed ones, which several passes are going to write."""

    @property
    def committable(self) -> int:
        """Number of slots, counted from the first, up to which slots may be committed."""
        # States are known of the last pass alone.
        return min(self.capacity, self.limit) if self.states is None else max(self.length, self.states.end)

    @property
    def replay(self) -> int | None:
        """Number of committed tokens that the next pass runs once more; None where a rejection costs nothing.

        Where it is a number, the accepted tokens of a draft that is rejected in the middle run once more too.
        """
        return None if self.states is None or self.states.cuts_anywhere else self.replay_at(self.length)

    def replay_at(self, length: int) -> int:
        """Number of tokens that would run once more in a pass behind the first `length` slots, committed or held."""
        return 0 if self.states is None else self.states.replay_at(length)

    @property
    def anchors(self) -> tuple[int, int]:
        """Positions to which a sequence is rewound to compute the same bits again."""
        return self.plain_length, self.last_prefill[0]

    def hold_from(self, position: int | None) -> None:
        """Hold what passes leave from `position` on, so that a chain of short passes can be cut anywhere.

        Slots that are rewound can be committed again until a pass overwrites them, and a pass that begins where an
        earlier one did costs nothing more. What was held before `position` is released; None releases everything.
        """
        if self.states is not None:  # slots stay until they are overwritten
            self.states.hold_from(position)

    def commit(self, tokens: int) -> None:
        """Commit the `tokens` slots after the committed ones, which a pass has just written."""
        if not 0 <= tokens <= self.committable - self.length:
            raise ValueError(f"cannot commit {tokens} slots at {self.length} of {self.committable}")
        if self.states is not None:
            self.states.commit(tokens)
        if self.is_plain and self.plain_length == self.length:
            self.plain_length += tokens
        self.length += tokens

    def rewind_to(self, length: int) -> None:
        """Discard the slots from `length` on; the next pass overwrites them."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot rewind from {self.length} slots to {length}")
        if self.states is not None:
            self.states.rewind_to(length, is_plain=length < self.plain_length)
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
        if base + path[-1] >= self.committable:
            raise ValueError(f"path {list(path)} leaves the arena of {self.committable} slots")
        if path[-1] >= len(path):
            if self.states is not None:
                raise ValueError(f"states are known along a chain, not along the path {list(path)}")
            nodes = np.asarray(path, np.intp)
            moved = np.flatnonzero(nodes != np.arange(nodes.size))
            self.buffers.move(base + nodes[moved], base + moved)
        if self.features is not None:
            self.features.compact(base, path)
        if self.states is not None:
            self.states.commit(len(path))
        self.length = base + len(path)

    def pad_to(self, length: int, value: float) -> None:
        """Commit slots filled with `value` up to `length`, and states of zeros, to time passes at a context length.

        Raises:
            ContextError: they do not fit the context.
        """
        self.reserve(length - self.length)
        self._resize(length)
        if length > self.length:
            self.buffers.fill(self.length, length, value)
        if self.states is not None:
            self.states.restart([0] * length, {}, length)  # from zeros, whatever the tokens are
        self.length = length

    def snapshot(self) -> CacheSnapshot:
        """Copy the committed slots, and behind them what `LayerStates.snapshot` copies."""
        beside = () if self.states is None else self.states.snapshot(self.anchors)
        return (*self.buffers.read(self.length), *beside)

    def restore(self, snapshot: CacheSnapshot) -> None:
        """Replace the committed slots by those of a `snapshot`.

        Numbers of another floating-point type, which a cache on another device has, are converted; then no slot counts
        as plain decoding's.

        Raises:
            ValueError: the snapshot is of a model with other cache tensors, or has numbers that the type cannot hold.
            ContextError: it holds more slots than the context allows.
        """
        beside: CacheSnapshot = ()
        if self.states is not None:
            snapshot, beside = self.states.split(snapshot)
        if len(snapshot) != len(self.groups):
            raise ValueError(f"expected a snapshot of {len(self.groups)} types of tensors, found {len(snapshot)}")
        axis = next(iter(self.groups)).axis + 1
        slots = snapshot[0].shape[axis] if snapshot[0].ndim > axis else 0
        for array, (tensor_type, members) in zip(snapshot, self.groups.items(), strict=True):
            expected = (len(members), *tensor_type.shape_of(slots))
            # Devices keep 16-bit or 32-bit floats, and nothing else stands for another type.
            floats = array.dtype.kind == tensor_type.dtype.kind == "f" and array.dtype.itemsize <= 4
            if array.shape != expected or not (floats or array.dtype == tensor_type.dtype):
                raise ValueError(
                    f"expected {tensor_type.dtype} slots {list(expected)}, found {array.dtype} {list(array.shape)}"
                )
        converted = tuple(
            _converted(array, tensor_type.dtype) for array, tensor_type in zip(snapshot, self.groups, strict=True)
        )
        self._empty(slots)
        if self.states is not None:
            self.states.restore(beside, slots)
        self.buffers.write(converted, slots)
        if self.features is not None:
            self.features.copy_from(None, slots)
        same_types = all(array is before for array, before in zip(converted, snapshot, strict=True))
        self.length, self.plain_length = slots, slots if same_types else 0

    def copy_from(self, source: KVArena, slots: int) -> None:
        """Replace the committed slots by the first `slots` of another arena of the same tensor and state types.

        Raises:
            ContextError: they do not fit the context.
        """
        if source.tensor_types != self.tensor_types or not 0 <= slots <= source.length:
            raise ValueError(f"cannot copy {slots} of {source.length} slots of {source.tensor_types}")
        self._empty(slots)
        self.buffers.copy(source.buffers, slots)
        if self.features is not None:
            self.features.copy_from(source.features, slots)
        if self.states is not None:
            self.states.copy_from(source.states, slots, source.anchors)
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

    def _empty(self, slots: int) -> None:
        """Discard all slots, and make room for others."""
        self.rewind_to(0)
        self.reserve(slots)
        self._resize(slots)

    def _resize(self, slots: int) -> None:  # noqa: B027 -- only growing tensors have no free slots
        """Give the tensors `slots` slots; there is room for them."""


def shared_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of equal tokens at the beginning of both sequences."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


def _converted(array: Array, dtype: np.dtype[Any]) -> Array:
    """The array with elements of another type; itself if it has that type.

    Raises:
        ValueError: a number is too large for the type.
    """
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    if not np.isfinite(converted).all():
        raise ValueError(f"a number of the cache is too large for {dtype}")
    return converted


class InPlaceArena(KVArena):
    """An arena whose tensors are extended in place: past and present are one buffer of `capacity` slots.

    Args:
        tensor_types: types of the graph's cache tensors.
        limit: largest number of tokens of the context.
        state_types: types of the states of layers without attention.
        capacities: numbers of slots for which there are graphs, ascending, if graphs fix them; the capacity is the
            smallest that holds the committed slots and those of the next pass (length-adaptive compilation of
            FlightLLM, Zeng et al. 2024). Without any, the buffers grow.
        new_buffers: makes buffers of a number of slots that hold zeros.

    Attributes:
        generation: number of times that the buffers were replaced, so that their users know when to take new ones.
    """

    def __init__(
        self,
        tensor_types: Sequence[CacheTensorType],
        limit: int,
        state_types: Sequence[StateType] = (),
        *,
        capacities: Sequence[int] = (),
        new_buffers: Callable[[Sequence[CacheTensorType], int], CacheBuffers] = StackedBuffers,
    ) -> None:
        super().__init__(tensor_types, min(limit, capacities[-1]) if capacities else limit, state_types)
        self.generation = 0
        self._capacities: Final = tuple(capacities)
        self._capacity = capacities[0] if capacities else min(_FIRST_CAPACITY, limit)
        self._buffers = new_buffers(self.tensor_types, self._capacity)

    @property
    def capacity(self) -> int:
        """Number of slots of the buffers."""
        return self._capacity

    @property
    def buffers(self) -> CacheBuffers:
        """The buffers of the cache tensors, which growing replaces."""
        return self._buffers

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more slots; buffers without fixed capacities grow up to the limit."""
        needed = self.check_fits(tokens)
        if self._capacities:
            # It shrinks only where `_SHRINK_AT` times what is needed fits, so that it does not change back and forth.
            wanted = needed if needed > self._capacity else min(needed * _SHRINK_AT, self._capacity)
            capacity = self._capacities[bisect_left(self._capacities, wanted)]
        else:
            capacity = self._capacity if needed <= self._capacity else min(self._grown(needed), self.limit)
        if capacity != self._capacity:
            try:
                self._capacity, self._buffers = capacity, self._buffers.resized(capacity)
            except BaseException:  # the slots may be gone that were moved already
                self.rewind_to(0)
                raise
            self.generation += 1

    def expect(self, tokens: int) -> None:
        """Grow once for a long prompt and the beginning of its answer, which would replace the buffers repeatedly."""
        needed = min(self.length + tokens, self.limit)
        if not self._capacities and needed > self._capacity:
            self.reserve(min(needed + needed // 8, self.limit) - self.length)

    def _grown(self, needed: int) -> int:
        """The next capacity: doubled while it is small, then larger by an eighth, and at least `needed` slots."""
        grown = self._capacity
        while grown < needed and grown < self._buffers.doubled_up_to:
            grown *= 2
        if grown < needed:
            grown = max(needed, grown + grown // 8)
            grown += -grown % _STEP
        return grown
