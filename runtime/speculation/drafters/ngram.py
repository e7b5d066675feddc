"""The n-gram prior: what the last one to four tokens were followed by in texts counted beforehand.

It knows nothing of the conversation, and guesses where repetition has nothing to say: within words, after common
beginnings, along phrases. Its guesses are mostly weak, so each says how weak: a bucket stands for the guess's
interpolated probability, and for how many tokens of context made it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from ..tree import Source
from .interface import Candidate, State
from .ngram_counts import MOST_ORDER, PROBABILITY_STEPS
from .ngram_table import NgramTable

GUESSES: Final = 3
"""At one place at most."""
_CLASS_STARTS: Final = (0.02, 0.05, 0.1, 0.15, 0.25, 0.36, 0.5, 0.65, 0.75)
"""Probabilities at which the second and later classes begin."""
_CLASSES: Final = len(_CLASS_STARTS) + 1
_PRIOR: Final = (
    (0.007, 0.028, 0.054, 0.063, 0.107, 0.185, 0.203, 0.257, 0.453, 0.422),
    (0.007, 0.015, 0.044, 0.080, 0.114, 0.201, 0.292, 0.358, 0.396, 0.711),
    (0.008, 0.011, 0.031, 0.058, 0.099, 0.173, 0.212, 0.303, 0.399, 0.681),
    (0.007, 0.022, 0.022, 0.057, 0.104, 0.150, 0.287, 0.372, 0.452, 0.740),
)
"""By the tokens of the context and the class of the probability: measured on the recorded answers of one 8B model, with
tables of foreign text with and without that model's other answers."""
_BUCKETS: Final = tuple(share for shares in _PRIOR for share in shares)
_LEFT: Final = (0.95, 0.85, 0.7, 0.4)
"""By how often a context was seen: the share of its probability that is left to what only shorter contexts know."""
_STEP: Final = 1 / PROBABILITY_STEPS


class NgramDrafter:
    """Guesses from a table of n-grams; a `Drafter`. Its state is the text's last tokens."""

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
        return _BUCKETS

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

    def candidates(self, state: State) -> list[Candidate]:
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
                    best[token] = (probability, order)
            if values:
                left *= _LEFT[values[0] & 3]
        ranked = sorted(best.items(), key=lambda item: -item[1][0])[:GUESSES]
        return [
            Candidate(token, (order - 1) * _CLASSES + bisect_right(_CLASS_STARTS, probability))
            for token, (probability, order) in ranked
        ]
