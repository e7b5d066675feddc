"""States of layers without attention: their types, and the buffers that passes read and write.

A state is either a layer's inputs at the last tokens (a convolution), or one value that every token changes (linear
attention, state space models). A pass writes to other buffers than those it reads, so the states before it survive it,
and accepting all its tokens exchanges the buffers without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

States: TypeAlias = npt.NDArray[Any]
"""States of the layers of one type, `[layers, *shape]`, of that type's elements."""
Checkpoint: TypeAlias = tuple[States, ...]
"""States of all layers at one position, by type."""

_FLOAT32: Final = np.dtype(np.float32)
KEPT_WIDTH: Final = 32
"""Width of the widest pass whose output buffers are kept for later passes."""


@dataclass(frozen=True)
class StateType:
    """Elements and size of the states of some layers, and what a pass returns of them."""

    layers: int
    """Number of layers with such a state."""
    shape: tuple[int, ...]
    """Shape of one state; of a convolution, the number of tokens and that of channels."""
    of_every_token: bool
    """Whether a pass returns the states followed by the inputs of its tokens, from which the state after each of them
    can be taken. Otherwise it returns the states after its last token."""
    dtype: np.dtype[Any] = _FLOAT32

    def over(self, tokens: int) -> tuple[int, ...]:
        """Shape of what a pass over some tokens returns."""
        if not self.of_every_token:
            return (self.layers, *self.shape)
        return (self.layers, self.shape[0] + tokens, *self.shape[1:])

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
    """The part of the buffer that is the states, `[layers, *shape]`; those of one layer are contiguous."""


class StateBuffers:
    """States of one type: those that the next pass starts from, and what the last pass returned.

    Attributes:
        state_type: type of the states.
        past: the states that the next pass starts from.
    """

    def __init__(self, state_type: StateType) -> None:
        self.state_type: Final = state_type
        self._own = np.zeros((state_type.layers, *state_type.shape), state_type.dtype)
        self._returned: dict[int, list[States]] = {} if state_type.of_every_token else {0: [self._own]}
        """Buffers for what passes return, by width; where that has the size of the states, for all widths."""
        self.past = StateView(self._own, 0, self._own)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        kept = [self._own, *(each for buffers in self._returned.values() for each in buffers)]
        return sum({id(each): each.nbytes for each in kept}.values())

    def new_output(self, width: int) -> States:
        """A buffer for what a pass over `width` tokens returns, in which the states that it starts from do not lie."""
        key = width if self.state_type.of_every_token else 0
        for buffer in self._returned.get(key, ()):
            if buffer is not self.past.buffer:
                return buffer
        buffer = np.empty(self.state_type.over(width), self.state_type.dtype)
        if self.keeps(width):
            self._returned.setdefault(key, []).append(buffer)
        return buffer

    def keeps(self, width: int) -> bool:
        """Whether the buffers for what passes over `width` tokens return are kept for later passes."""
        return width <= KEPT_WIDTH or not self.state_type.of_every_token

    def view(self, output: States, offset: int) -> StateView:
        """The states after the first `offset` tokens of the pass that returned `output`; after all, for a value that
        every token changes."""
        if not self.state_type.of_every_token:
            return StateView(output, 0, output)
        return StateView(output, offset, output[:, offset : offset + self.state_type.shape[0]])

    def start_from(self, view: StateView) -> None:
        """Let the next pass start from states that a pass returned."""
        if not self.keeps(view.buffer.shape[1] - self.state_type.shape[0]):
            # What a wide pass returned is not kept for the sake of a few of its rows.
            self.write(view.states)
        else:
            self.past = view

    def write(self, states: States | float) -> None:
        """Let the next pass start from a copy of `states`."""
        np.copyto(self._own, states)
        self.past = StateView(self._own, 0, self._own)
