"""The text that calibration reads: one part to choose by, another to judge by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...errors import InputError
from ...runtime.text.turn_markers import TokenArray

FEWEST_TOKENS: Final = 1024
"""Of a text that is worth calibrating with, both parts together."""
_HELD_OUT: Final = 4
"""One token in so many is held out."""


@dataclass(frozen=True)
class CalibrationText:
    """Token ids, int64 [n] each, at least two in every text."""

    calibration: tuple[TokenArray, ...]
    """What statistics are taken from and plans are chosen by."""
    held_out: tuple[TokenArray, ...]
    """What the outcome is measured on."""
    origin: str
    """Where it is from, for people: a file, or the model itself."""

    @property
    def tokens(self) -> int:
        """Tokens of both parts."""
        return sum(map(len, (*self.calibration, *self.held_out)))


def divided(texts: Sequence[TokenArray], origin: str, longest: int, seed: int = 0) -> CalibrationText:
    """Divide texts in two parts that share none, in an order drawn by `seed`.

    Args:
        texts: token ids; those that occur twice count once.
        origin: where they are from.
        longest: what is read of a text; the rest of a longer one is further texts.
        seed: of the order, which is also that of the batches: whoever reads the first few has a fair sample.

    Raises:
        InputError: there are too few tokens.
    """
    pieces = {
        piece.tobytes(): piece
        for text in texts
        for piece in np.split(np.asarray(text, np.int64), range(longest, len(text), longest))
        if len(piece) > 1
    }
    total = sum(map(len, pieces.values()))
    if total < FEWEST_TOKENS:
        raise InputError(
            f"the text to calibrate with has {total} tokens", f"give at least {FEWEST_TOKENS}, better some ten thousand"
        )
    found = list(pieces.values())
    if len(found) < _HELD_OUT:
        found = [part for piece in found for part in np.array_split(piece, min(_HELD_OUT, len(piece) // 2))]
    order = np.random.default_rng(seed).permutation(len(found))
    held_out: list[TokenArray] = []
    calibration: list[TokenArray] = []
    for number in order.tolist():
        wanting = _HELD_OUT * sum(map(len, held_out)) < total
        (held_out if wanting else calibration).append(found[number])
    return CalibrationText(tuple(calibration), tuple(held_out), origin)
