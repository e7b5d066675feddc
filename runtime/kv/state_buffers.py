"""States of layers without attention: their types, and the buffers that passes read and write.

A state is either a layer's inputs at the last tokens (a convolution), or one value that every token changes (linear
attention, state space models). A pass writes to other buffers than those it reads, so the states before it survive it,
and accepting all its tokens exchanges the buffers without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

States: TypeAlias = npt.NDArray[Any]
"""States of the layers of one type, `[layers, *shape]`, of that type's elements."""
StateCheckpoint: TypeAlias = tuple[States, ...]
"""States of all layers at one position, by type."""

_FLOAT32: Final = np.dtype(np.float32)
UPDATED_WIDTH: Final = 32
"""Number of tokens at the end of a pass for which graphs with updates return updates and inputs of convolutions."""
KEPT_WIDTH: Final = 32
"""Largest number of tokens whose inputs an output buffer may hold that is kept for later passes."""


class StatePart(Enum):
    """What an input and an output of a graph are of a state."""

    WHOLE = auto()
    """The state itself."""
    UPDATED = auto()
    """A state that the graph first advances by updates, in place, and then by the tokens of the pass."""
    UPDATES = auto()
    """The updates of such a state: by the accepted tokens of the last pass, and by the tokens of this one."""


@dataclass(frozen=True)
class StateType:
    """Elements and size of the states of some layers, and what a pass returns of them."""

    layers: int
    """Number of layers with such a state."""
    shape: tuple[int, ...]
    """Shape of one state; of a convolution, the numbers of tokens and of channels."""
    of_every_token: bool
    """Whether a pass returns the states followed by the inputs of its tokens, from which the state after each of them
    can be taken. Otherwise it returns the states after its last token."""
    dtype: np.dtype[Any] = _FLOAT32
    part: StatePart = StatePart.WHOLE
    kept: int | None = None
    """Number of tokens at the end of a pass whose inputs are returned; None for all."""

    def over(self, tokens: int) -> tuple[int, ...]:
        """Shape of what a pass over some tokens returns."""
        return (self.layers, self.shape[0] + self.returned(tokens), *self.shape[1:])

    def returned(self, tokens: int) -> int:
        """Number of tokens whose inputs a pass over some tokens returns, behind the states that it started from."""
        if not self.of_every_token:
            return 0
        return tokens if self.kept is None else min(tokens, self.kept)

    @property
    def nbytes(self) -> int:
        """Bytes of the states at one position."""
        return self.dtype.itemsize * self.layers * int(np.prod(self.shape))


def total_bytes(types: Sequence[StateType]) -> int:
    """Bytes of the states of some types at one position."""
    return sum(each.nbytes for each in types)


class StateView(NamedTuple):
    """States in a buffer."""

    buffer: States
    first: int
    """Number of tokens of the buffer before the states."""
    states: States
    """The part of the buffer that is the states, `[layers, *shape]`; the states of one layer are contiguous."""


class StateBuffers:
    """States of one type: those that the next pass starts from, and what the last pass returned.

    Attributes:
        state_type: type of the states.
        past: the states that the next pass starts from.
        held: states that earlier passes started from, by position; no pass writes to their buffers.
    """

    def __init__(self, state_type: StateType) -> None:
        self.state_type: Final = state_type
        self._own = np.zeros((state_type.layers, *state_type.shape), state_type.dtype)
        self._returned: dict[int, list[States]] = {} if state_type.of_every_token else {0: [self._own]}
        """Buffers for what passes return, by the number of tokens whose inputs they hold."""
        self.past = StateView(self._own, 0, self._own)
        self.held: dict[int, StateView] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        returned = [each for buffers in self._returned.values() for each in buffers if each is not self._own]
        return sum(each.nbytes for each in (self._own, *returned))

    def new_output(self, width: int) -> States:
        """A buffer for what a pass over `width` tokens returns, in which no states lie that are needed."""
        key = self.state_type.returned(width)
        for buffer in self._returned.get(key, ()):
            if buffer is not self.past.buffer and not self._holds(buffer):
                return buffer
        buffer = np.empty(self.state_type.over(width), self.state_type.dtype)
        if self.keeps(width):
            self._returned.setdefault(key, []).append(buffer)
        return buffer

    def keeps(self, width: int) -> bool:
        """Whether the buffers for what passes over `width` tokens return are kept for later passes."""
        return self.state_type.returned(width) <= KEPT_WIDTH

    def view(self, output: States, offset: int, width: int) -> StateView | None:
        """The states after the first tokens of a pass; None if they are not known.

        Args:
            output: what the pass returned.
            offset: number of the first tokens, at least 1.
            width: number of all.
        """
        state_type = self.state_type
        if state_type.part is StatePart.UPDATES:
            if offset == width:
                return StateView(self._own, 0, self._own)
            return StateView(output, offset, output[:, :offset]) if width <= output.shape[1] else None
        if not state_type.of_every_token:
            if offset == width:
                return StateView(output, 0, output)
            return self.past if state_type.part is StatePart.UPDATED else None
        first = output.shape[1] - state_type.shape[0] - (width - offset)
        return StateView(output, first, output[:, first : first + state_type.shape[0]]) if first >= 0 else None

    def start_from(self, view: StateView) -> None:
        """Let the next pass start from states that a pass returned."""
        if not self.keeps(view.buffer.shape[1] - self.state_type.shape[0]):
            # What a wide pass returned is not kept for the sake of a few of its rows.
            self.write(view.states)
        else:
            self.past = view

    def end_pass(self) -> None:
        """Forget the updates that the pass has applied to the states it started from."""
        if self.state_type.part is StatePart.UPDATES:
            self.past = StateView(self._own, 0, self._own)

    def release(self) -> None:
        """Hold no states, and free the buffers that this took."""
        self.held.clear()
        for buffers in self._returned.values():
            del buffers[2:]

    def _holds(self, buffer: States) -> bool:
        return any(view.buffer is buffer for view in self.held.values())

    def write(self, states: States | float) -> None:
        """Let the next pass start from a copy of `states`."""
        if self._holds(self._own):
            self._own = np.empty_like(self._own)
            if not self.state_type.of_every_token:
                self._returned[0].append(self._own)
        np.copyto(self._own, states)
        self.past = StateView(self._own, 0, self._own)
