"""The arena of hybrid models: a KV cache, and beside it the states of layers without attention.

The state of a convolution is its inputs at the last few tokens. A pass returns those before it followed by the inputs
of all its tokens, so the state after any of them is a part of what it returned, and rewinding within the last pass is
exact and free. The state of linear attention has one value after a pass; the one before the pass survives it. Where
only some tokens of a pass are accepted, the next pass advances it by their updates, if the graph returns updates;
otherwise these tokens run once more from there, inside the next pass. For positions further back there are
checkpoints, and the tokens since the newest one run once more (docs/decisions/0075-convolution-states.md,
docs/decisions/0076-recurrent-states.md). A draft model runs a chain of short passes that may be cut after any of them;
there, the buffers that the passes started from are held instead of being reused (docs/decisions/0085-hybrid-drafts.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

import numpy as np

from .arena import InPlaceArena, KVArena
from .buffers import CacheSnapshot, CacheTensorType
from .growing import GrowingArena
from .state_buffers import StateBuffers, StateCheckpoint, StatePart, StateType, StateView, total_bytes

_LEAST_SPACING: Final = 16
"""Smallest number of tokens between two checkpoints."""
_CACHE_SHARE: Final = 8
"""Checkpoints may take one in so many bytes of the KV cache. For LFM2-350M that is one every 32 tokens: a rewind to
anywhere runs 16 tokens again on average, which takes as long as five tokens of decoding."""
_OTHER_CHECKPOINTS: Final = 4
"""Number of checkpoints that may lie elsewhere: see `HybridArena.move_states`."""
_HELD_BYTES: Final = 128 << 20
"""Bytes of states that are held at most: six positions of Qwen3.5-0.8B. Tokens behind the last one run once more."""


def largest_state_snapshot(types: Sequence[StateType], slots: int) -> int:
    """Bytes that a snapshot of `slots` slots may have besides those of the KV cache."""
    return 8 * slots + (slots // _LEAST_SPACING + _OTHER_CHECKPOINTS) * (total_bytes(types) + 8)


class HybridArena(KVArena):
    """KV cache of one token sequence, and the states of its layers without attention.

    Attributes:
        state_types: types of the states.
        spacing: number of tokens between two checkpoints.
        states: by type, the states that the next pass starts from.
        token_ids: tokens of the committed slots, from which states are computed again.
    """

    state_types: tuple[StateType, ...]
    spacing: int
    states: tuple[StateBuffers, ...]
    token_ids: list[int]

    def _start(self, state_types: Sequence[StateType]) -> None:
        """Set the attributes; the slots of the KV cache are ready."""
        self.state_types = tuple(state_types)
        slot_bytes = sum(tensor_type.slot_bytes for tensor_type in self.tensor_types)
        needed = max(_LEAST_SPACING, -(-_CACHE_SHARE * total_bytes(state_types) // slot_bytes))
        self.spacing = 1 << (needed - 1).bit_length()
        parts = {each.part for each in state_types}
        self._has_updates = StatePart.UPDATES in parts
        """Whether the next pass can bring states from the beginning of the last pass to any of its tokens."""
        self._cuts_anywhere = all(each.of_every_token or each.part is StatePart.UPDATED for each in state_types)
        """Whether the next pass can start after any token of the last one."""
        self.states = tuple(StateBuffers(each) for each in state_types)
        self.token_ids = []
        self._position = 0
        """Number of tokens before the states."""
        self._checkpoints: dict[int, StateCheckpoint] = {}
        """Copies of the states by position; they are never written, so that several arenas may share them."""
        self._outputs: StateCheckpoint | None = None
        """What the last pass returned, which began at `_position`; None if no pass began there."""
        self._end = 0
        """Position after the last token of `_outputs`."""
        self._pass_ids: list[int] = []
        """Tokens of the last pass, without those that ran once more."""
        self._pass_base = 0
        """Position of the first of `_pass_ids`."""
        self._rewound_to = 0
        """Position to which slots of plain decoding were last rewound, as for another answer to the same prompt."""
        self._held_from: int | None = None
        """See `hold_from`. What is held lies in the buffers, by the same positions for all of them."""
        self._most_held = max(1, _HELD_BYTES // max(total_bytes(state_types), 1))

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, of the states and of their checkpoints."""
        buffers = sum(each.nbytes for each in self.states)
        return super().nbytes + buffers + total_bytes(self.state_types) * len(self._checkpoints)

    @property
    def written(self) -> int:
        """See `KVArena.written`: states are known of the last pass alone."""
        return max(self.length, self._pass_base + len(self._pass_ids))

    @property
    def replay(self) -> int | None:
        """See `KVArena.replay`."""
        return None if self._cuts_anywhere else self.replay_at(self.length)

    def replay_at(self, length: int) -> int:
        """See `KVArena.replay_at`."""
        return 0 if self._views_at(length) is not None else length - self._newest_known(length)

    def hold_from(self, position: int | None) -> None:
        """See `KVArena.hold_from`."""
        self._held_from = position
        if position is None:
            for buffers in self.states:
                buffers.release()
        else:
            needed = max((each for each in self._held if each <= position), default=position)
            self._drop_held([each for each in self._held if each < needed])

    def commit(self, tokens: int) -> None:
        """See `KVArena.commit`."""
        first = self.length - self._pass_base
        super().commit(tokens)
        self.token_ids += self._pass_ids[first : first + tokens]

    def compact(self, base: int, path: Sequence[int]) -> None:
        """See `KVArena.compact`; the path must be the beginning of a chain."""
        if list(path) != list(range(len(path))):
            raise ValueError(f"states are known along a chain, not along the path {list(path)}")
        first = self.length - self._pass_base
        super().compact(base, path)
        self.token_ids += self._pass_ids[first : first + len(path)]

    def rewind_to(self, length: int) -> None:
        """See `KVArena.rewind_to`. The states follow in the next pass."""
        holds = self._held_from is not None and self._held_from <= length
        if length < self.plain_length and not holds:
            self._rewound_to = length
        super().rewind_to(length)
        if length < self._pass_base:
            written = self.token_ids[length : self._pass_base] + self._pass_ids
            self._pass_ids, self._pass_base = written if holds else [], length
        del self.token_ids[length:]
        if not holds:
            self._forget_after(length)

    def pad_to(self, length: int, value: float) -> None:
        """See `KVArena.pad_to`; the states become zeros."""
        super().pad_to(length, value)
        self._write_states(None)
        self._start_from([0] * length, {}, length)

    def snapshot(self) -> CacheSnapshot:
        """Copy the committed slots, their token ids, and the checkpoints of the states with their positions."""
        known = self._known_up_to(self.length)
        positions = sorted(known)
        states = [
            np.array([known[each][index] for each in positions], buffers.state_type.dtype).reshape(
                len(positions), *buffers.shape
            )
            for index, buffers in enumerate(self.states)
        ]
        return (*super().snapshot(), np.array(self.token_ids, np.int64), np.array(positions, np.int64), *states)

    def restore(self, snapshot: CacheSnapshot) -> None:
        """See `KVArena.restore`."""
        kinds = len(self.states)
        if len(snapshot) <= kinds + 2:
            raise ValueError("expected a snapshot with states of layers without attention")
        slots, (token_ids, positions, *states) = snapshot[: -kinds - 2], snapshot[-kinds - 2 :]
        if token_ids.dtype != np.int64 or token_ids.ndim != 1 or positions.dtype != np.int64 or positions.ndim != 1:
            raise ValueError("expected token ids and positions of states")
        for found, buffers in zip(states, self.states, strict=True):
            expected, dtype = (positions.size, *buffers.shape), buffers.state_type.dtype
            if found.dtype != dtype or found.shape != expected:
                raise ValueError(f"expected {dtype} states {list(expected)}, found {found.dtype} {list(found.shape)}")
        if positions.size and not 0 < positions.min() <= positions.max() <= token_ids.size:
            raise ValueError(f"expected states of positions 1 to {token_ids.size}, found {positions.tolist()}")
        self.rewind_to(0)
        super().restore(slots)
        if self.length != token_ids.size:
            raise ValueError(f"expected {self.length} token ids, found {token_ids.size}")
        known = {
            position: tuple(found[index].copy() for found in states)
            for index, position in enumerate(positions.tolist())
        }
        self._start_from(token_ids.tolist(), known, 0)

    def copy_from(self, source: KVArena, slots: int) -> None:
        """See `KVArena.copy_from`; the source must be of a hybrid model too."""
        if not isinstance(source, HybridArena) or source.state_types != self.state_types:
            raise ValueError(f"cannot copy the states of {self.state_types} from {type(source).__name__}")
        self.rewind_to(0)
        super().copy_from(source, slots)
        self._start_from(source.token_ids[:slots], source._known_up_to(slots), 0)

    def move_states(self) -> list[int]:
        """Move the states to the committed length, or as near before it as is known; forget the last pass.

        Returns:
            Tokens between the states and the committed length, which have to run once more.
        """
        position, length = self._position, self.length
        self._forget_after(length)
        if position != length:
            crosses = position // self.spacing != length // self.spacing
            if (
                crosses
                or position <= self.plain_length < length
                or position <= self.last_prefill[0] < length
                or position <= self._rewound_to < length
            ):
                self._keep_checkpoints()
            if (views := self._views_at(length)) is not None:
                if self._has_updates and position < length < self._end and length not in self._held:
                    self._drop_held([position])  # the next pass applies the updates in place
                for buffers, view in zip(self.states, views, strict=True):
                    buffers.start_from(view)
                self._position = length
            else:
                self._move_to_checkpoint()
        self._outputs = None
        self._pass_ids, self._pass_base = [], length
        return self.token_ids[self._position : length]

    def new_outputs(self, width: int) -> StateCheckpoint:
        """Buffers for what a pass over `width` tokens returns of the states, by type."""
        return tuple(each.new_output(width) for each in self.states)

    def end_pass(self, ids: list[int], outputs: StateCheckpoint) -> None:
        """Take over the result of a pass over `ids`, before which `move_states` was called."""
        self._outputs, self._end = outputs, self.length + len(ids)
        self._pass_ids = ids
        for buffers in self.states:
            buffers.end_pass()
        self._hold()
        self._count_replay(self.length - self._position)

    def join_passes(self, ids: list[int]) -> None:
        """Take the tokens of several passes, which began at the committed length, for those of the last pass."""
        self._pass_ids, self._pass_base = ids, self.length

    def end_replay(self, ids: list[int], outputs: StateCheckpoint) -> None:
        """Take over the result of a pass over the first of the tokens that `move_states` returned, and no new ones."""
        for buffers, output in zip(self.states, outputs, strict=True):
            if (view := buffers.view(output, len(ids), len(ids))) is not None:
                buffers.start_from(view)
        self._count_replay(len(ids))
        self._position += len(ids)

    def _count_replay(self, tokens: int) -> None:
        if tokens:
            # Slots that ran once more, in a wide pass, may differ in the last bits.
            self.plain_length = min(self.plain_length, self._position)
            self.replayed += tokens

    def _views_at(self, position: int) -> list[StateView] | None:
        """The states at a position, by type, as parts of what passes read or returned; None if they are not known."""
        if position == self._position:
            return [each.past for each in self.states]
        if position in self._held:
            return [each.held[position] for each in self.states]
        if self._outputs is None or not self._position < position <= self._end:
            return None
        offset, width = position - self._position, self._end - self._position
        views = [
            buffers.view(output, offset, width) for buffers, output in zip(self.states, self._outputs, strict=True)
        ]
        known = [view for view in views if view is not None]
        return known if len(known) == len(views) else None

    def forget_states(self) -> None:
        """Start from a checkpoint, because a pass that failed may have written to the states it started from."""
        if self._has_updates:
            self._drop_held([self._position])
            self._position = self.length + 1
            self._outputs = None
            self._move_to_checkpoint()

    def _copy_at(self, position: int) -> StateCheckpoint | None:
        """A copy of the states at a position; None if they are not known."""
        if self._has_updates and self._position < position < self._end:
            return None  # the matrices there are made by the next pass
        views = self._views_at(position)
        return None if views is None else tuple(view.states.copy() for view in views)

    def _keep_checkpoints(self) -> None:
        """Copy the states that lie in the last pass and will be needed, up to the committed length.

        Besides the first ones of every `spacing` tokens, these are the states at which sequences are rewound to
        compute the same bits again: the beginning of the last prefill pass, the end of plain decoding's slots, and
        where they were last rewound to.
        """
        last = min(self.length, self._end)
        spaced = set(range(-(-self._position // self.spacing) * self.spacing, last + 1, self.spacing))
        if self._position // self.spacing != last // self.spacing:
            spaced.add(last)
        wanted = {self.plain_length, self.last_prefill[0], self._rewound_to}
        for position in sorted(spaced | wanted):
            if (
                0 < position <= last
                and position not in self._checkpoints
                and (states := self._copy_at(position)) is not None
            ):
                self._checkpoints[position] = states
        before = -1
        for position in sorted(self._checkpoints):
            if position // self.spacing == before // self.spacing and position not in {*wanted, self.length}:
                del self._checkpoints[position]
            else:
                before = position

    def _known_up_to(self, length: int) -> dict[int, StateCheckpoint]:
        """Copies of the states by position, up to a committed length and at it, or as near before it as is known."""
        self._keep_checkpoints()
        known = {position: state for position, state in self._checkpoints.items() if position <= length}
        if length in known:
            return known
        newest, states = length, self._copy_at(length)
        if states is None:
            newest, states = self._position, self._copy_at(self._position)
        if states is not None and 0 < newest <= length:
            known.setdefault(newest, states)
        return known

    def _move_to_checkpoint(self) -> None:
        nearest = self._newest_known(self.length)
        if nearest == self._position:
            return
        if nearest in self._held:
            for buffers in self.states:
                buffers.start_from(buffers.held[nearest])
        else:
            self._write_states(self._checkpoints[nearest] if nearest else None)
        self._position = nearest

    def _newest_known(self, length: int) -> int:
        """The last position up to a length at which the states are known before the last pass."""
        known = [each for each in (self._position, *self._checkpoints, *self._held) if each <= length]
        return max(known, default=0)

    @property
    def _held(self) -> Collection[int]:
        """Positions of the states that are held."""
        return self.states[0].held

    def _hold(self) -> None:
        """Hold the states that the last pass started from, if they are asked for and there is room."""
        position, first = self._position, self._held_from
        if first is None or position < first:
            return
        self._drop_held([each for each in self._held if each < first])
        if len(self._held) < self._most_held:
            for buffers in self.states:
                buffers.held[position] = buffers.past

    def _drop_held(self, positions: Iterable[int]) -> None:
        for position in positions:
            for buffers in self.states:
                buffers.held.pop(position, None)

    def _forget_after(self, length: int) -> None:
        """Drop copies and held states behind a length, whose tokens may be others from now on."""
        for position in [each for each in self._checkpoints if each > length]:
            del self._checkpoints[position]
        self._drop_held([each for each in self._held if each > length])

    def _write_states(self, states: StateCheckpoint | None) -> None:
        """Let the next pass start from a copy of some states, or from zeros, those before the first token."""
        for index, buffers in enumerate(self.states):
            buffers.write(0.0 if states is None else states[index])

    def _start_from(self, token_ids: list[int], checkpoints: dict[int, StateCheckpoint], position: int) -> None:
        """Forget all passes; `position` is that of the states, which lie at 0 unless they were written just now."""
        if not position:
            self._write_states(None)
        self.token_ids, self._checkpoints, self._position = token_ids, checkpoints, position
        self._outputs, self._end = None, 0
        self._pass_ids, self._pass_base = [], self.length
        self.hold_from(None)


class InPlaceHybridArena(HybridArena, InPlaceArena):
    """A hybrid arena over a cache that the graph extends in place.

    Args:
        tensor_types: types of the graph's cache tensors.
        limit: largest number of tokens of the context.
        state_types: types of the states.
        capacity: as for `InPlaceArena`.
    """

    def __init__(
        self,
        tensor_types: Sequence[CacheTensorType],
        limit: int,
        state_types: Sequence[StateType],
        capacity: int | None = None,
    ) -> None:
        InPlaceArena.__init__(self, tensor_types, limit, capacity)
        self._start(state_types)


class GrowingHybridArena(HybridArena, GrowingArena):
    """A hybrid arena over a cache that the graph returns longer than it took it.

    Args:
        tensor_types: types of the graph's cache tensors.
        limit: largest number of tokens of the context.
        state_types: types of the states.
    """

    def __init__(self, tensor_types: Sequence[CacheTensorType], limit: int, state_types: Sequence[StateType]) -> None:
        GrowingArena.__init__(self, tensor_types, limit)
        self._start(state_types)
