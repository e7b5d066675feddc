"""Candidates from repetitions of earlier conversations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final

from ..tree import Source
from .history_index import REACH
from .history_store import HistoryStore
from .interface import EARLIER_CONVERSATIONS, Agreement, Candidate, TailDrafter, bucket

_MAX_CANDIDATES: Final = 3


class HistoryDrafter(TailDrafter):
    """Proposes the tokens that followed the longest matches of the end of the sequence in a store's sequences.

    A fixed number of places is examined, so that a lookup takes the same time in any store; of a short match, which has
    many places, they are a sample. Before a store has an index there are no candidates. An index that is made during an
    answer is used from the next `reset`, which begins the next answer.

    Args:
        store: earlier sequences of the model.
        vocab_size: vocabulary size; larger token ids in the store are not proposed.
    """

    source = Source.HISTORY
    prior = EARLIER_CONVERSATIONS
    reach = REACH

    def __init__(self, store: HistoryStore, vocab_size: int) -> None:
        self._store = store
        self._index = store.index
        self._vocab_size = vocab_size

    def reset(self, token_ids: Sequence[int]) -> None:
        """Replace the sequence, and use the store's latest index from now on."""
        self._index = self._store.index
        super().reset(token_ids)

    def candidates(self, state: tuple[int, ...]) -> list[Candidate]:
        """Up to three: tokens that followed the longest match, most frequent first, then tokens after shorter ones."""
        if self._index is None or not state:
            return []
        candidates: list[Candidate] = []
        counts: dict[int, int] = {}
        # Places with a match of the same length count together, and places of longer matches too.
        for missing, places in groupby(sorted(self._index.find(state)), itemgetter(0)):
            new = []
            for _, _, follower in places:
                if follower < self._vocab_size:
                    if follower not in counts:
                        new.append(follower)
                    counts[follower] = counts.get(follower, 0) + 1
            if not new:
                continue
            total = sum(counts.values())
            if len(counts) == 1:
                agreement = Agreement.ONCE if total == 1 else Agreement.ALWAYS
            else:
                agreement = Agreement.MOSTLY if 2 * max(counts.values()) > total else Agreement.SPLIT
            for token in sorted(new, key=counts.__getitem__, reverse=True):
                candidates.append(Candidate(token, bucket(len(state) - missing, agreement, len(candidates))))
                if len(candidates) == _MAX_CANDIDATES:
                    return candidates
        return candidates
