"""Candidates from repetitions of earlier conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from ..tree import Source
from .history_index import REACH
from .history_store import HistoryStore
from .interface import EARLIER_CONVERSATIONS, Agreement, Candidate, Drafter, bucket

_MAX_CANDIDATES: Final = 3

Tail: TypeAlias = tuple[int, ...]
"""The last tokens of a sequence, up to `REACH`."""


class HistoryDrafter(Drafter):
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

    def __init__(self, store: HistoryStore, vocab_size: int) -> None:
        self._store = store
        self._index = store.index
        self._vocab_size = vocab_size
        self._tail: Tail = ()

    def reset(self, token_ids: Sequence[int]) -> None:
        """Replace the sequence, and use the store's latest index from now on."""
        self._index = self._store.index
        self._tail = tuple(token_ids[-REACH:])

    def append(self, token: int) -> None:
        """Append a token to the sequence."""
        self._tail = self.after(self._tail, token)

    def state(self) -> Tail:
        """The end of the sequence."""
        return self._tail

    def after(self, state: Tail, token: int) -> Tail:
        """The end of the sequence after one more token."""
        return (*state[1 - REACH :], token) if len(state) == REACH else (*state, token)

    def candidates(self, state: Tail) -> list[Candidate]:
        """Up to three: tokens that followed the longest match, most frequent first, then tokens after shorter ones."""
        if self._index is None or not state:
            return []
        found = sorted(self._index.find(state))
        candidates: list[Candidate] = []
        counts: dict[int, int] = {}
        new: list[int] = []
        places = 0
        for at, (missing, _, follower) in enumerate(found):
            if follower < self._vocab_size:
                if follower not in counts:
                    counts[follower] = 0
                    new.append(follower)
                counts[follower] += 1
                places += 1
            if not new or (at + 1 < len(found) and found[at + 1][0] == missing):
                continue
            # All places with a match of this length or longer have been counted.
            if len(counts) == 1:
                agreement = Agreement.ONCE if places == 1 else Agreement.ALWAYS
            else:
                agreement = Agreement.MOSTLY if 2 * max(counts.values()) > places else Agreement.SPLIT
            for token in sorted(new, key=counts.__getitem__, reverse=True):
                candidates.append(Candidate(token, bucket(len(state) - missing, agreement, len(candidates))))
                if len(candidates) == _MAX_CANDIDATES:
                    return candidates
            new.clear()
        return candidates
