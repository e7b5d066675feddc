"""Texts side by side in batches of one shape, so that few large passes run what many small ones would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from ...runtime.text.turn_markers import TokenArray

Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

SLOTS: Final = 512
"""About how many tokens go into a pass: more are hardly faster, take more memory, and cannot be had by halves."""
_MASKED: Final = np.float32(-1e9)
_NOTHING: Final = -1


@dataclass(frozen=True)
class Batch:
    """B rows of S slots; a row holds one text after the other, and nothing at its end."""

    tokens: TokenArray
    """int64 [B, S]; 0 in empty slots."""
    positions: npt.NDArray[np.int64]
    """Of a token in its text, int64 [B, S]."""
    texts: npt.NDArray[np.int64]
    """Which text a token is of, int64 [B, S]; -1 in empty slots."""
    counted: BoolArray
    """Tokens to compare models on, bool [B, S]: those with an own past. What many texts begin with counts once."""
    following: npt.NDArray[np.int64]
    """The token that follows in the text, int64 [B, S]; -1 where the text ends."""
    _biases: dict[int | None, Float32Array] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def count(self) -> int:
        """How many tokens are counted."""
        return int(self.counted.sum())

    @property
    def filled(self) -> BoolArray:
        """Slots that hold a token, bool [B, S]."""
        return np.asarray(self.texts != _NOTHING)

    def bias(self, window: int | None) -> Float32Array:
        """What to add to attention scores, float32 [B, 1, S, S]: a token sees those before it in its text.

        With a window, only those less than `window` positions back.
        """
        if window not in self._biases:
            age = self.positions[:, :, None] - self.positions[:, None, :]
            seen = (self.texts[:, :, None] == self.texts[:, None, :]) & (age >= 0)
            if window is not None:
                seen &= age < window
            # An empty slot sees something too: a row of scores that are all masked has no softmax.
            seen |= np.eye(self.tokens.shape[1], dtype=bool)
            self._biases[window] = np.where(seen, np.float32(0), _MASKED)[:, None]
        return self._biases[window]


def packed(texts: Sequence[TokenArray], slots: int = SLOTS) -> list[Batch]:
    """Batches that hold the texts, in their order as nearly as they fit; each has about `slots` slots."""
    width = max(map(len, texts))
    rows_of_batch = max(1, slots // width)
    seen: dict[tuple[int, int], int] = {}
    batches: list[Batch] = []
    rows: list[list[int]] = []  # numbers of texts
    room: list[int] = []
    for number, text in enumerate(texts):
        row = next((row for row, left in enumerate(room) if left >= len(text)), None)
        if row is None:
            if len(rows) == rows_of_batch:
                batches.append(_batch(texts, rows, seen))
                rows, room = [], []
            row = len(rows)
            rows.append([])
            room.append(width)
        rows[row].append(number)
        room[row] -= len(text)
    return [*batches, _batch(texts, rows, seen)]


def _batch(texts: Sequence[TokenArray], rows: list[list[int]], seen: dict[tuple[int, int], int]) -> Batch:
    """One batch; `seen` holds the beginnings met so far, each numbered, by that of one token less and its last."""
    width = max(sum(len(texts[number]) for number in row) for row in rows)
    shape = len(rows), width
    tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    owners, following, counted = np.full(shape, _NOTHING), np.full(shape, _NOTHING), np.zeros(shape, bool)
    for row, numbers in enumerate(rows):
        start = 0
        for number in numbers:
            text = texts[number]
            place = row, slice(start, start + len(text))
            tokens[place], positions[place], owners[place] = text, np.arange(len(text)), number
            following[row, start : start + len(text) - 1] = text[1:]
            counted[place] = _new(text, seen)
            start += len(text)
    return Batch(tokens, positions, owners, counted, following)


def _new(text: TokenArray, seen: dict[tuple[int, int], int]) -> list[bool]:
    """Whether the text up to each token was not met before."""
    beginning, new = _NOTHING, []
    for token in text.tolist():
        step = beginning, token
        new.append(step not in seen)
        beginning = seen.setdefault(step, len(seen))
    return new
