"""Packs texts into batches of one shape for few large passes."""

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
"""Approximate number of tokens of a batch: more are hardly faster, need more memory, and cannot be run in part."""
_MASKED: Final = np.float32(-1e9)
_FORGOTTEN: Final = np.float32(-1e4)
"""Logarithm of a decay to 0 in float32."""
_NONE: Final = -1


@dataclass(frozen=True)
class Batch:
    """B rows of S slots; a row holds one text after the other, and empty slots at its end."""

    tokens: TokenArray
    """Token ids, int64 [B, S]; 0 in empty slots."""
    positions: npt.NDArray[np.int64]
    """Position of each token in its text, int64 [B, S]."""
    texts: npt.NDArray[np.int64]
    """Index of each token's text, int64 [B, S]; -1 in empty slots."""
    counted: BoolArray
    """Tokens on which models are compared, bool [B, S]: a beginning that several texts share is counted once."""
    following: npt.NDArray[np.int64]
    """Next token of the text, int64 [B, S]; -1 at its end."""
    _biases: dict[int | None, Float32Array] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def count(self) -> int:
        """Number of counted tokens."""
        return int(self.counted.sum())

    @property
    def filled(self) -> BoolArray:
        """Slots that hold a token, bool [B, S]."""
        return np.asarray(self.texts != _NONE)

    def within_text(self, back: int) -> Float32Array:
        """Which tokens have one of their own text `back` slots before them, float32 [B, S, 1] of zeros and ones."""
        return (self.positions >= back)[..., None].astype(np.float32)

    def text_starts(self) -> Float32Array:
        """Logarithms of a decay that leaves nothing where a text begins, float32 [B, S, 1]; 0 elsewhere."""
        return np.where(self.positions == 0, _FORGOTTEN, np.float32(0))[..., None]

    def bias(self, window: int | None) -> Float32Array:
        """Attention bias, float32 [B, 1, S, S], with which a token attends to the tokens before it in its text.

        Args:
            window: Number of positions that a layer with a sliding window attends to; None for all.
        """
        if window not in self._biases:
            age = self.positions[:, :, None] - self.positions[:, None, :]
            attended = (self.texts[:, :, None] == self.texts[:, None, :]) & (age >= 0)
            if window is not None:
                attended &= age < window
            # An empty slot attends to itself, since a row of scores that are all masked has no softmax.
            attended |= np.eye(self.tokens.shape[1], dtype=bool)
            self._biases[window] = np.where(attended, np.float32(0), _MASKED)[:, None]
        return self._biases[window]


def pack_texts(texts: Sequence[TokenArray], slots: int = SLOTS) -> list[Batch]:
    """Pack texts, in their order as far as they fit, into batches of about `slots` slots each."""
    width = max(map(len, texts))
    rows_of_batch = max(1, slots // width)
    known_prefixes: dict[tuple[int, int], int] = {}
    batches: list[Batch] = []
    rows: list[list[int]] = []  # indices of texts
    room: list[int] = []
    for number, text in enumerate(texts):
        row = next((row for row, left in enumerate(room) if left >= len(text)), None)
        if row is None:
            if len(rows) == rows_of_batch:
                batches.append(_batch(texts, rows, known_prefixes))
                rows, room = [], []
            row = len(rows)
            rows.append([])
            room.append(width)
        rows[row].append(number)
        room[row] -= len(text)
    return [*batches, _batch(texts, rows, known_prefixes)]


def _batch(texts: Sequence[TokenArray], rows: list[list[int]], known_prefixes: dict[tuple[int, int], int]) -> Batch:
    """One batch; `known_prefixes` numbers each prefix so far by the number of its own prefix and its last token."""
    width = max(sum(len(texts[number]) for number in row) for row in rows)
    shape = len(rows), width
    tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    owners, following, counted = np.full(shape, _NONE), np.full(shape, _NONE), np.zeros(shape, bool)
    for row, numbers in enumerate(rows):
        start = 0
        for number in numbers:
            text = texts[number]
            place = row, slice(start, start + len(text))
            tokens[place], positions[place], owners[place] = text, np.arange(len(text)), number
            following[row, start : start + len(text) - 1] = text[1:]
            counted[place] = _is_new(text, known_prefixes)
            start += len(text)
    return Batch(tokens, positions, owners, counted, following)


def _is_new(text: TokenArray, known_prefixes: dict[tuple[int, int], int]) -> list[bool]:
    """For each token, whether no earlier text begins like this text up to it."""
    prefix, new = _NONE, []
    for token in text.tolist():
        step = prefix, token
        new.append(step not in known_prefixes)
        prefix = known_prefixes.setdefault(step, len(known_prefixes))
    return new
