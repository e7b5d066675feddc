"""States of layers without attention, which lie beside the KV cache of one token sequence.

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

from collections.abc import Collection, Sequence
from typing import Final

import numpy as np

from .buffers import CacheSnapshot
from .state_buffers import StateBuffers, StateCheckpoint, StatePart, StateType, StateView, total_bytes

_LEAST_SPACING: Final = 16
"""Smallest number of tokens between two checkpoints."""
_CACHE_SHARE: Final = 8
"""Checkpoints may take one in so many bytes of the KV cache. For LFM2-350M that is one every 32 tokens: a rewind to
anywhere runs 16 tokens again on average, which takes as long as five tokens of decoding."""
_OTHER_CHECKPOINTS: Final = 4
"""Number of checkpoints that may lie elsewhere: see `LayerStates`."""
_HELD_BYTES: Final = 128 << 20
"""Bytes of states that are held at most: six positions of Qwen3.5-0.8B. Tokens behind the last one run once more."""
_IN_SNAPSHOT: Final = 2
"""Number of arrays of a snapshot before the states: token ids, and positions of the states."""


def largest_state_snapshot(types: Sequence[StateType], slots: int) -> int:
    """Bytes that a snapshot of `slots` slots may have besides the slots of the KV cache."""
    return 8 * slots + (slots // _LEAST_SPACING + _OTHER_CHECKPOINTS) * (total_bytes(types) + 8)


class LayerStates:
    """The states of a sequence's layers without attention, and the tokens from which they are computed again.

    A pass runs between `move_to` and `end_pass`. Besides the first ones of every `spacing` tokens, checkpoints are the
    states at which sequences are rewound to compute the same bits again: the beginning of the last prefill pass, the
    end of plain decoding's slots, and where they were last rewound to. These are called anchors.

    Args:
        types: types of the states.
        slot_bytes: bytes of one slot of the KV cache.

    Attributes:
        types: types of the states.
        buffers: by type, the states that the next pass starts from.
        checkpoints: copies of the states by position; they are never written, so that several sequences may share them.
        spacing: number of tokens between two checkpoints.
        token_ids: tokens of the committed slots.
        cuts_anywhere: whether the next pass can start after any token of the last one.
    """

    def __init__(self, types: Sequence[StateType], slot_bytes: int) -> None:
        self.types: Final = tuple(types)
        needed = max(_LEAST_SPACING, -(-_CACHE_SHARE * total_bytes(types) // slot_bytes))
        self.spacing = 1 << (needed - 1).bit_length()
        self.checkpoints: dict[int, StateCheckpoint] = {}
        self._has_updates: Final = any(each.part is StatePart.UPDATES for each in types)
        """Whether the next pass can bring states from the beginning of the last pass to any of its tokens."""
        self.cuts_anywhere: Final = all(each.of_every_token or each.part is StatePart.UPDATED for each in types)
        self.buffers: Final = tuple(StateBuffers(each) for each in types)
        self._held: Final[Collection[int]] = self.buffers[0].held
        """Positions of the states that are held."""
        self._runs = False
        """Whether a pass has begun and not ended."""
        self.token_ids: list[int] = []
        self._position = 0
        """Number of tokens before the states."""
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
        self._most_held = max(1, _HELD_BYTES // max(total_bytes(types), 1))

    @property
    def nbytes(self) -> int:
        """Bytes of the states and of their checkpoints."""
        checkpoints = total_bytes(self.types) * len(self.checkpoints)
        return sum(each.nbytes for each in self.buffers) + checkpoints

    @property
    def end(self) -> int:
        """Position after the last token of the last pass, as far as it was not rewound."""
        return self._pass_base + len(self._pass_ids)

    def replay_at(self, length: int) -> int:
        """Number of tokens that would run once more in a pass at a position."""
        return 0 if self._views_at(length) is not None else length - self._newest_known(length)

    def hold_from(self, position: int | None) -> None:
        """Hold the states that passes start from, at `position` and later; see `KVArena.hold_from`."""
        self._held_from = position
        if position is None:
            for buffers in self.buffers:
                buffers.release()
        else:
            self._keep_held(max((each for each in self._held if each <= position), default=position))

    def commit(self, tokens: int) -> None:
        """Commit the first of the last pass's tokens that are not committed yet."""
        first = len(self.token_ids) - self._pass_base
        self.token_ids += self._pass_ids[first : first + tokens]

    def rewind_to(self, length: int, *, is_plain: bool) -> None:
        """Discard the tokens from `length` on; the states follow in the next pass.

        Args:
            length: number of tokens that stay.
            is_plain: whether slots of plain decoding are among those that are discarded.
        """
        holds = self._held_from is not None and self._held_from <= length
        if is_plain and not holds:
            self._rewound_to = length
        if length < self._pass_base:
            written = self.token_ids[length : self._pass_base] + self._pass_ids
            self._pass_ids, self._pass_base = written if holds else [], length
        del self.token_ids[length:]
        if not holds:
            self._forget_after(length)

    def snapshot(self, anchors: Collection[int]) -> CacheSnapshot:
        """Copy the token ids, and the checkpoints of the states with their positions."""
        known = self._known_up_to(len(self.token_ids), anchors)
        positions = sorted(known)
        states = [
            np.array([known[each][index] for each in positions], state_type.dtype).reshape(
                len(positions), state_type.layers, *state_type.shape
            )
            for index, state_type in enumerate(self.types)
        ]
        return np.array(self.token_ids, np.int64), np.array(positions, np.int64), *states

    def split(self, snapshot: CacheSnapshot) -> tuple[CacheSnapshot, CacheSnapshot]:
        """A snapshot of an arena without what `snapshot` returned, and that."""
        count = len(snapshot) - _IN_SNAPSHOT - len(self.types)
        if count < 1:
            raise ValueError("expected a snapshot with states of layers without attention")
        return snapshot[:count], snapshot[count:]

    def restore(self, snapshot: CacheSnapshot, slots: int) -> None:
        """Continue from what `snapshot` returned of `slots` tokens.

        Raises:
            ValueError: it has other types, shapes or positions.
        """
        token_ids, positions, *states = snapshot
        if token_ids.dtype != np.int64 or token_ids.ndim != 1 or positions.dtype != np.int64 or positions.ndim != 1:
            raise ValueError("expected token ids and positions of states")
        for found, each in zip(states, self.types, strict=True):
            expected = (positions.size, each.layers, *each.shape)
            if found.dtype != each.dtype or found.shape != expected:
                raise ValueError(
                    f"expected {each.dtype} states {list(expected)}, found {found.dtype} {list(found.shape)}"
                )
        if positions.size and not 0 < positions.min() <= positions.max() <= token_ids.size:
            raise ValueError(f"expected states of positions 1 to {token_ids.size}, found {positions.tolist()}")
        if token_ids.size != slots:
            raise ValueError(f"expected {slots} token ids, found {token_ids.size}")
        known = {
            position: tuple(found[index].copy() for found in states)
            for index, position in enumerate(positions.tolist())
        }
        self.restart(token_ids.tolist(), known)

    def copy_from(self, source: LayerStates | None, slots: int, anchors: Collection[int]) -> None:
        """Continue from the first `slots` tokens of another sequence, whose anchors are given."""
        if source is None or source.types != self.types:
            raise ValueError(f"the states are not of the types {self.types}")
        self.restart(source.token_ids[:slots], source._known_up_to(slots, anchors))

    def move_to(self, length: int, anchors: Collection[int]) -> list[int]:
        """Move the states to a position, or as near before it as is known; forget the last pass.

        Returns:
            Tokens between the states and `length`, which have to run once more.
        """
        position, spacing = self._position, self.spacing
        self._forget_after(length)
        if position != length:
            crosses = position // spacing != length // spacing
            if crosses or any(position <= each < length for each in (*anchors, self._rewound_to)):
                self._keep_checkpoints(anchors)
            if (views := self._views_at(length)) is not None:
                if self._has_updates and position < length < self._end and length not in self._held:
                    self._drop_held(position)  # the next pass applies the updates in place
                for buffers, view in zip(self.buffers, views, strict=True):
                    buffers.start_from(view)
                self._position = length
            else:
                self._move_to_checkpoint()
        self._outputs, self._runs = None, True
        self._pass_ids, self._pass_base = [], length
        return self.token_ids[self._position : length]

    def end_pass(self, ids: list[int], outputs: StateCheckpoint) -> None:
        """Take over the result of a pass over `ids`, before which `move_to` was called."""
        self._outputs, self._pass_ids, self._runs = outputs, ids, False
        self._end = self.end
        for buffers in self.buffers:
            buffers.end_pass()
        position, first = self._position, self._held_from
        if first is not None and position >= first:
            self._keep_held(first)
            if len(self._held) < self._most_held:
                for buffers in self.buffers:
                    buffers.held[position] = buffers.past

    def join_passes(self, ids: list[int]) -> None:
        """Take the tokens of several passes, which began at the committed length, as the tokens of the last pass."""
        self._pass_ids, self._pass_base = ids, len(self.token_ids)

    def end_replay(self, tokens: int, outputs: StateCheckpoint) -> None:
        """Take over the result of a pass over the first of the tokens that `move_to` returned, and no new ones."""
        for buffers, output in zip(self.buffers, outputs, strict=True):
            if (view := buffers.view(output, tokens, tokens)) is not None:
                buffers.start_from(view)
        self._position += tokens

    def forget_states(self) -> None:
        """Start from a checkpoint, because a pass that failed may have written to the states it started from."""
        self._runs = False
        if self._has_updates:
            self._drop_held(self._position)
            self._position = len(self.token_ids) + 1
            self._outputs = None
            self._move_to_checkpoint()

    def _views_at(self, position: int) -> list[StateView] | None:
        """The states at a position, by type, as parts of what passes read or returned; None if they are not known."""
        if position == self._position:
            return [each.past for each in self.buffers]
        if position in self._held:
            return [each.held[position] for each in self.buffers]
        if self._outputs is None or not self._position < position <= self._end:
            return None
        offset, width = position - self._position, self._end - self._position
        views = [
            buffers.view(output, offset, width) for buffers, output in zip(self.buffers, self._outputs, strict=True)
        ]
        known = [view for view in views if view is not None]
        return known if len(known) == len(views) else None

    def _copy_at(self, position: int) -> StateCheckpoint | None:
        """A copy of the states at a position; None if they are not known."""
        if self._has_updates and (self._position < position < self._end or (self._runs and position == self._position)):
            return None  # the matrices there are made by the next pass, or changed by the one that runs
        views = self._views_at(position)
        return None if views is None else tuple(view.states.copy() for view in views)

    def _keep_checkpoints(self, anchors: Collection[int]) -> None:
        """Copy the states that lie in the last pass and will be needed, up to the committed length.

        Of the others, all but the first of every `spacing` tokens are dropped.
        """
        length, kept, spacing = len(self.token_ids), {*anchors, self._rewound_to}, self.spacing
        first, last = self._position, min(length, self._end)
        wanted = {*kept, *range(-(-first // spacing) * spacing, last + 1, spacing)}
        if first // spacing != last // spacing:
            wanted.add(last)
        for position in sorted(wanted - self.checkpoints.keys()):
            if 0 < position <= last and (states := self._copy_at(position)) is not None:
                self.checkpoints[position] = states
        before = -1
        for position in sorted(self.checkpoints):
            if position // spacing == before // spacing and position not in (*kept, length):
                del self.checkpoints[position]
            else:
                before = position

    def _checkpoints_up_to(self, length: int) -> dict[int, StateCheckpoint]:
        return {position: states for position, states in self.checkpoints.items() if position <= length}

    def _known_up_to(self, length: int, anchors: Collection[int]) -> dict[int, StateCheckpoint]:
        """Copies of the states by position, up to a committed length and at it, or as near before it as is known."""
        self._keep_checkpoints(anchors)
        known = self._checkpoints_up_to(length)
        for position in (length, self._position):
            if length not in known and 0 < position <= length and (states := self._copy_at(position)) is not None:
                known[position] = states
        return known

    def _move_to_checkpoint(self) -> None:
        nearest = self._newest_known(len(self.token_ids))
        if nearest == self._position:
            return
        for index, buffers in enumerate(self.buffers):
            if nearest in buffers.held:
                buffers.start_from(buffers.held[nearest])
            else:
                buffers.write(self.checkpoints[nearest][index] if nearest else 0.0)
        self._position = nearest

    def _newest_known(self, length: int) -> int:
        """The last position up to a length at which the states are known before the last pass."""
        known = (self._position, *self.checkpoints, *self._held)
        return max((each for each in known if each <= length), default=0)

    def _keep_held(self, first: int) -> None:
        """Release what is held before a position."""
        self._drop_held(*[each for each in self._held if each < first])

    def _drop_held(self, *positions: int) -> None:
        for buffers in self.buffers:
            for position in positions:
                buffers.held.pop(position, None)

    def _forget_after(self, length: int) -> None:
        """Drop copies and held states behind a length, whose tokens may be others from now on."""
        self.checkpoints = self._checkpoints_up_to(length)
        self._drop_held(*[each for each in self._held if each > length])

    def restart(self, token_ids: list[int], known: dict[int, StateCheckpoint], position: int = 0) -> None:
        """Forget all passes; the states are zeros at `position`, and others are known at earlier ones."""
        for buffers in self.buffers:
            buffers.write(0.0)
        self.token_ids, self.checkpoints, self._position = token_ids, known, position
        self._outputs, self._end = None, 0
        self._pass_ids, self._pass_base = [], len(token_ids)
        self.hold_from(None)
