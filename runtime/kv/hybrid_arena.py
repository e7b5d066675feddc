"""The arena of hybrid models: a KV cache, and beside it the states of layers without attention.

The state of a convolution is its inputs at the last few tokens. A pass returns those before it followed by the inputs
of all its tokens, so the state after any of them is a part of what it returned, and rewinding within the last pass is
exact and free. For positions further back there are checkpoints. Where none lies at the position itself, the tokens
since the newest one before it run once more, inside the next pass (docs/decisions/0075-convolution-states.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from .arena import InPlaceArena, KVArena
from .buffers import CacheSnapshot, CacheTensorType

States = npt.NDArray[np.float32]

_LEAST_SPACING: Final = 16
"""Smallest number of tokens between two checkpoints."""
_CACHE_SHARE: Final = 8
"""Checkpoints may take one in so many bytes of the KV cache. For LFM2-350M that is one every 32 tokens: a rewind to
anywhere runs 16 tokens again on average, which takes as long as five tokens of decoding."""
KEPT_WIDTH: Final = 32
"""Width of the widest pass whose output buffers are kept for later passes."""
_OTHER_CHECKPOINTS: Final = 4
"""Number of checkpoints that may lie elsewhere: see `HybridArena.move_states`."""
_STATE_ARRAYS: Final = 3
"""Number of arrays of a snapshot after those of the KV cache: token ids, positions of checkpoints, checkpoints."""


@dataclass(frozen=True)
class StateShape:
    """Size of the convolution states of a model, float32."""

    layers: int
    """Number of layers with a convolution."""
    tokens: int
    """Number of tokens before the next one whose inputs are kept."""
    channels: int

    def over(self, tokens: int = 0) -> tuple[int, int, int]:
        """Shape of the states, followed by the inputs of some more tokens."""
        return self.layers, self.tokens + tokens, self.channels

    @property
    def nbytes(self) -> int:
        """Bytes of the states at one position."""
        return 4 * self.layers * self.tokens * self.channels

    def largest_snapshot(self, slots: int) -> int:
        """Bytes that a snapshot of `slots` slots may have besides those of the KV cache."""
        return 8 * slots + (slots // _LEAST_SPACING + _OTHER_CHECKPOINTS) * (self.nbytes + 8)


class HybridArena(InPlaceArena):
    """KV cache and convolution states of one token sequence.

    Args:
        tensor_types: types of the graph's cache tensors.
        limit: largest number of tokens of the context.
        shape: size of the states.
        capacity: as for `InPlaceArena`.

    Attributes:
        shape: size of the states.
        spacing: number of tokens between two checkpoints.
        states: the states that the next pass starts from, float32 `[layers, tokens, channels]`, always in one place.
        token_ids: tokens of the committed slots, from which states are computed again.
        replayed: number of tokens that have run once more since the arena was made.
    """

    def __init__(
        self, tensor_types: Sequence[CacheTensorType], limit: int, shape: StateShape, capacity: int | None = None
    ) -> None:
        super().__init__(tensor_types, limit, capacity)
        self.shape: Final = shape
        slot_bytes = sum(tensor_type.slot_bytes for tensor_type in tensor_types)
        needed = max(_LEAST_SPACING, -(-_CACHE_SHARE * shape.nbytes // slot_bytes))
        self.spacing: Final = 1 << (needed - 1).bit_length()
        self.states: Final[States] = np.zeros(shape.over(), np.float32)
        self.token_ids: list[int] = []
        self.replayed = 0
        self._position = 0
        """Number of tokens before the states."""
        self._checkpoints: dict[int, States] = {}
        """Copies of the states by position; they are never written, so that several arenas may share them."""
        self._strips: dict[int, States] = {}
        self._strip: States | None = None
        """States and new inputs of the last pass, which began at `_position`; None if no pass began there."""
        self._strip_end = 0
        """Position after the last token of `_strip`."""
        self._pass_ids: list[int] = []
        """Tokens of the last pass, without those that ran once more."""
        self._pass_base = 0
        self._rewound_to = 0
        """Position to which slots of plain decoding were last rewound, as for another answer to the same prompt."""

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, of the states and of their checkpoints."""
        strips = sum(strip.nbytes for strip in self._strips.values())
        return super().nbytes + strips + self.shape.nbytes * (1 + len(self._checkpoints))

    @property
    def written(self) -> int:
        """See `KVArena.written`: states are known of the last pass alone."""
        return max(self.length, self._pass_base + len(self._pass_ids))

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
        if length < self.plain_length:
            self._rewound_to = length
        super().rewind_to(length)
        del self.token_ids[length:]
        if length < self._pass_base:
            self._pass_ids, self._pass_base = [], length
        for position in [each for each in self._checkpoints if each > length]:
            del self._checkpoints[position]

    def pad_to(self, length: int, value: float) -> None:
        """See `KVArena.pad_to`; the states become zeros."""
        super().pad_to(length, value)
        self.states.fill(0)
        self._start_from([0] * length, {}, length)

    def snapshot(self) -> CacheSnapshot:
        """Copy the committed slots, their token ids, and the checkpoints of the states with their positions."""
        known = self._known_up_to(self.length)
        positions = sorted(known)
        states = np.array([known[each] for each in positions], np.float32)
        return (
            *super().snapshot(),
            np.array(self.token_ids, np.int64),
            np.array(positions, np.int64),
            states.reshape(len(positions), *self.shape.over()),
        )

    def restore(self, snapshot: CacheSnapshot) -> None:
        """See `KVArena.restore`."""
        if len(snapshot) <= _STATE_ARRAYS:
            raise ValueError("expected a snapshot with states of convolutions")
        *slots, token_ids, positions, states = snapshot
        if token_ids.dtype != np.int64 or token_ids.ndim != 1 or positions.dtype != np.int64 or positions.ndim != 1:
            raise ValueError("expected token ids and positions of states")
        expected = (positions.size, *self.shape.over())
        if states.dtype != np.float32 or states.shape != expected:
            raise ValueError(f"expected float32 states {list(expected)}, found {states.dtype} {list(states.shape)}")
        if positions.size and not 0 < positions.min() <= positions.max() <= token_ids.size:
            raise ValueError(f"expected states of positions 1 to {token_ids.size}, found {positions.tolist()}")
        self.rewind_to(0)
        super().restore(tuple(slots))
        if self.length != token_ids.size:
            raise ValueError(f"expected {self.length} token ids, found {token_ids.size}")
        found = zip(positions.tolist(), states, strict=True)
        self._start_from(token_ids.tolist(), {position: state.copy() for position, state in found}, 0)

    def copy_from(self, source: KVArena, slots: int) -> None:
        """See `KVArena.copy_from`; the source must be of a hybrid model too."""
        if not isinstance(source, HybridArena) or source.shape != self.shape:
            raise ValueError(f"cannot copy the states of {self.shape} from {type(source).__name__}")
        self.rewind_to(0)
        super().copy_from(source, slots)
        self._start_from(source.token_ids[:slots], source._known_up_to(slots), 0)

    def move_states(self) -> list[int]:
        """Move the states to the committed length, or as near before it as is known; forget the last pass.

        Returns:
            Tokens between the states and the committed length, which have to run once more.
        """
        position, length = self._position, self.length
        if position != length:
            crosses = position // self.spacing != length // self.spacing
            if (
                crosses
                or position <= self.plain_length < length
                or position <= self.last_prefill[0] < length
                or position <= self._rewound_to < length
            ):
                self._keep_checkpoints()
            if (state := self._state_in_strip(length)) is not None:
                np.copyto(self.states, state)
                self._position = length
            else:
                self._move_to_checkpoint()
        self._strip = None
        self._pass_ids, self._pass_base = [], length
        return self.token_ids[self._position : length]

    def new_strip(self, width: int) -> States:
        """A buffer for what a pass over `width` tokens returns: the states, followed by the inputs of its tokens."""
        strip = self._strips.get(width)
        if strip is None:
            strip = np.empty(self.shape.over(width), np.float32)
            if width <= KEPT_WIDTH:
                self._strips[width] = strip
        return strip

    def end_pass(self, ids: list[int], strip: States) -> None:
        """Take over the result of a pass over `ids`, before which `move_states` was called."""
        self._strip, self._strip_end = strip, self.length + len(ids)
        self._pass_ids = ids
        replayed = self.length - self._position
        if replayed:
            # Slots that ran once more, in a wide pass, may differ in the last bits.
            self.plain_length = min(self.plain_length, self._position)
            self.replayed += replayed

    def _state_in_strip(self, position: int) -> States | None:
        """The states at a position, as a part of what the last pass returned; None if it did not reach there."""
        first = position - self._position
        if self._strip is None or first < 0 or position > self._strip_end:
            return None
        return self._strip[:, first : first + self.shape.tokens]

    def _keep_checkpoints(self) -> None:
        """Copy the states that lie in the last pass and will be needed, up to the committed length.

        Besides those at multiples of `spacing`, these are the states at which sequences are rewound to
        compute the same bits again: the beginning of the last prefill pass, the end of plain decoding's slots, and
        where they were last rewound to.
        """
        last = min(self.length, self._strip_end)
        wanted = {self.plain_length, self.last_prefill[0], self._rewound_to}
        for position in [each for each in self._checkpoints if each % self.spacing and each not in wanted]:
            del self._checkpoints[position]
        spaced = range(-(-self._position // self.spacing) * self.spacing, last + 1, self.spacing)
        for position in {*spaced, *wanted}:
            if 0 < position <= last and position not in self._checkpoints:
                state = self._state_in_strip(position)
                if state is not None:
                    self._checkpoints[position] = state.copy()

    def _known_up_to(self, length: int) -> dict[int, States]:
        """Copies of the states by position, up to a committed length and at it if they are known there."""
        self._keep_checkpoints()
        known = {position: state for position, state in self._checkpoints.items() if position <= length}
        state = self.states if self._position == length else self._state_in_strip(length)
        if length and state is not None:
            known[length] = state.copy()
        return known

    def _move_to_checkpoint(self) -> None:
        nearest = max((each for each in self._checkpoints if each <= self.length), default=0)
        if nearest <= self._position <= self.length:
            return
        np.copyto(self.states, self._checkpoints[nearest] if nearest else np.float32(0))
        self._position = nearest

    def _start_from(self, token_ids: list[int], checkpoints: dict[int, States], position: int) -> None:
        """Forget all passes; `position` is that of the states, which lie at 0 unless they were written just now."""
        if not position:
            self.states.fill(0)
        self.token_ids, self._checkpoints, self._position = token_ids, checkpoints, position
        self._strip, self._strip_end = None, 0
        self._pass_ids, self._pass_base = [], self.length
