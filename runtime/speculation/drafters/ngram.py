"""Candidates from n-gram counts of texts that were counted beforehand.

They do not depend on the conversation, and help where nothing repeats: within words, after common beginnings, along
phrases. Most of these candidates are weak, so the evidence bucket of each says how weak: it stands for the interpolated
probability and for the number of context tokens that it was computed from.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from ..tree import Source
from .interface import Candidate, State
from .ngram_counts import MAX_ORDER, PROBABILITY_STEPS
from .ngram_table import NgramTable

MAX_CANDIDATES: Final = 3
"""Maximum number of candidates at one place."""
_CLASS_STARTS: Final = (0.02, 0.05, 0.1, 0.15, 0.25, 0.36, 0.5, 0.65, 0.75)
"""Lower bounds of the second and later probability classes."""
_CLASSES: Final = len(_CLASS_STARTS) + 1
_PRIOR: Final = (
    (0.007, 0.028, 0.054, 0.063, 0.107, 0.185, 0.203, 0.257, 0.453, 0.422),
    (0.007, 0.015, 0.044, 0.080, 0.114, 0.201, 0.292, 0.358, 0.396, 0.711),
    (0.008, 0.011, 0.031, 0.058, 0.099, 0.173, 0.212, 0.303, 0.399, 0.681),
    (0.007, 0.022, 0.022, 0.057, 0.104, 0.150, 0.287, 0.372, 0.452, 0.740),
)
"""Prior acceptance rates by number of context tokens and class of the probability. Measured on the recorded answers of
one 8B model, with tables of foreign text, with and without that model's other answers."""
_BUCKETS: Final = tuple(rate for rates in _PRIOR for rate in rates)
_LEFT: Final = (0.95, 0.85, 0.7, 0.4)
"""By how often a context was seen: the share of the probability left to continuations of shorter contexts only."""
_STEP: Final = 1 / PROBABILITY_STEPS


class NgramDrafter:
    """A `Drafter` over a table of n-grams. Its state is the last tokens of the sequence."""

    def __init__(self, table: NgramTable) -> None:
        self._table = table
        self._last: tuple[int, ...] = ()

    @property
    def source(self) -> Source:
        """`Source.NGRAM`."""
        return Source.NGRAM

    @property
    def prior(self) -> Sequence[float]:
        """Acceptance rate on recorded answers, by bucket."""
        return _BUCKETS

    def reset(self, token_ids: Sequence[int]) -> None:
        """Replace the sequence."""
        self._last = tuple(token_ids[-MAX_ORDER:])

    def append(self, token: int) -> None:
        """Append a token to the sequence."""
        self._last = (*self._last, token)[-MAX_ORDER:]

    def state(self) -> tuple[int, ...]:
        """The last tokens of the sequence."""
        return self._last

    def after(self, state: State, token: int) -> tuple[int, ...]:
        """The last tokens after one more token."""
        last: tuple[int, ...] = (*state, token)
        return last[-MAX_ORDER:]

    def candidates(self, state: State) -> list[Candidate]:
        """Up to `MAX_CANDIDATES` continuations of the longest known context and shorter ones, most probable first."""
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
        ranked = sorted(best.items(), key=lambda item: -item[1][0])[:MAX_CANDIDATES]
        return [
            Candidate(token, (order - 1) * _CLASSES + bisect_right(_CLASS_STARTS, probability))
            for token, (probability, order) in ranked
        ]
