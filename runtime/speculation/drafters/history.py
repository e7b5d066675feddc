"""Guesses from repetitions of earlier conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from ..tree import Source
from .evidence import EARLIER_TEXTS, Agreement, bucket
from .history_index import REACH
from .history_store import HistoryStore
from .interface import Candidate

_GUESSES: Final = 3

Tail: TypeAlias = tuple[int, ...]
"""The last tokens of a text, up to `REACH`."""


class HistoryDrafter:
    """Guesses what followed the places in a store's sequences that share the most with the end of the text.

    A few places are looked at, so that a lookup takes the same in any store: of a short match, which has many, it is a
    sample. Before a store has an index there are no guesses.

    Args:
        store: the model's earlier sequences.
        vocabulary: token ids are below this; others, from whatever source, are not guessed.
    """

    source: Final = Source.HISTORY
    prior: Final = EARLIER_TEXTS

    def __init__(self, store: HistoryStore, vocabulary: int) -> None:
        self._store = store
        self._vocabulary = vocabulary
        self._tail: Tail = ()

    def follow(self, tokens: Sequence[int]) -> None:
        """Make `tokens` the text."""
        self._tail = tuple(tokens[-REACH:])

    def append(self, token: int) -> None:
        """Let the text grow by one token."""
        self._tail = self.after(self._tail, token)

    def state(self) -> Tail:
        """The end of the text."""
        return self._tail

    def after(self, state: Tail, token: int) -> Tail:
        """The end of the text and one more token."""
        return (*state[1 - REACH :], token) if len(state) == REACH else (*state, token)

    def candidates(self, state: Tail) -> list[Candidate]:
        """Up to three: what followed the longest match most often, then what followed shorter ones."""
        index = self._store.index
        if index is None or not state:
            return []
        found = sorted(index.find(state))
        candidates: list[Candidate] = []
        counts: dict[int, int] = {}
        new: list[int] = []
        places = 0
        for at, (missing, _, follower) in enumerate(found):
            if follower < self._vocabulary:
                if follower not in counts:
                    counts[follower] = 0
                    new.append(follower)
                counts[follower] += 1
                places += 1
            if not new or (at + 1 < len(found) and found[at + 1][0] == missing):
                continue
            # All places that agree in as many tokens, or more, are counted.
            agreement = _agreement(counts, places)
            for token in sorted(new, key=counts.__getitem__, reverse=True):
                candidates.append(Candidate(token, bucket(len(state) - missing, agreement, len(candidates))))
                if len(candidates) == _GUESSES:
                    return candidates
            new.clear()
        return candidates


def _agreement(counts: dict[int, int], places: int) -> Agreement:
    if len(counts) == 1:
        return Agreement.ONCE if places == 1 else Agreement.ALWAYS
    return Agreement.MOSTLY if 2 * max(counts.values()) > places else Agreement.SPLIT
