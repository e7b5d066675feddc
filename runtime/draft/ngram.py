"""The n-gram prior: what the last one to four tokens were followed by in texts counted beforehand.

It knows nothing of the conversation, and guesses where repetition has nothing to say: within words, after common
beginnings, along phrases. Its guesses are mostly weak, so each says how weak: a bucket stands for the guess's
interpolated probability, the tokens of the context that made it, and how often that context was seen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from .ngram_counts import COUNT_CLASSES, MOST_ORDER, PROBABILITY_STEPS
from .ngram_table import NgramTable
from .predictor import Guess, State
from .tree import Source

GUESSES: Final = 3
"""At one place at most."""
_CLASS_STARTS: Final = (0.04, 0.08, 0.16, 0.28, 0.44, 0.62)
"""Probabilities at which the second and later classes begin."""
_CLASSES: Final = len(_CLASS_STARTS) + 1
_LEFT: Final = (0.95, 0.85, 0.7, 0.4)
"""By how often a context was seen: the share of its probability that is left to what only shorter contexts know."""
_STEP: Final = 1 / PROBABILITY_STEPS
_CLASS_OF: Final = tuple(
    bisect_right(_CLASS_STARTS, (step + 0.5) / PROBABILITY_STEPS) for step in range(PROBABILITY_STEPS)
)


class NgramPredictor:
    """Guesses from a table of n-grams; a `Predictor`. Its state is the text's last tokens."""

    def __init__(self, table: NgramTable) -> None:
        self._table = table
        self._last: tuple[int, ...] = ()

    @property
    def source(self) -> Source:
        """`Source.NGRAM`."""
        return Source.NGRAM

    @property
    def prior(self) -> Sequence[float]:
        """How often guesses came true on recorded answers, by bucket."""
        return PRIOR

    def follow(self, tokens: Sequence[int]) -> None:
        """Make `tokens` the text."""
        self._last = tuple(tokens[-MOST_ORDER:])

    def append(self, token: int) -> None:
        """Let the text grow by one token."""
        self._last = (*self._last, token)[-MOST_ORDER:]

    def state(self) -> tuple[int, ...]:
        """The text's last tokens."""
        return self._last

    def after(self, state: State, token: int) -> tuple[int, ...]:
        """The last tokens when `token` has followed."""
        last: tuple[int, ...] = (*state, token)
        return last[-MOST_ORDER:]

    def guesses(self, state: State) -> list[Guess]:
        """Up to `GUESSES` tokens, likeliest first: the longest known context's, and those of shorter ones."""
        best: dict[int, tuple[float, int]] = {}
        found = self._table.find(state)
        left = _STEP
        for order in range(len(found), 0, -1):
            values = found[order - 1]
            for value in values:
                token = value >> 8
                probability = ((value >> 2 & 63) + 0.5) * left
                if token not in best or probability > best[token][0]:
                    best[token] = (probability, (order - 1) * COUNT_CLASSES + (value & 3))
            if values:
                left *= _LEFT[values[0] & 3]
        ranked = sorted(best.items(), key=lambda item: -item[1][0])[:GUESSES]
        return [
            Guess(token, evidence * _CLASSES + _CLASS_OF[int(probability * PROBABILITY_STEPS)])
            for token, (probability, evidence) in ranked
        ]


PRIOR: Final = (0.1,) * (MOST_ORDER * COUNT_CLASSES * _CLASSES)
