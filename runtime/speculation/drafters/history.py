"""Candidates from repetitions of earlier conversations, and the thread that indexes these.

A process drafts from its own earlier conversations once they are indexed. A thread does that when an answer has been
stored and the next one has not begun for a moment. It works in short steps, waits between them while an answer is
generated, and rests a hundred times as long as it worked. Where answers follow each other without a break it works
beside them, so that it takes at most a hundredth of one core (docs/decisions/0035-indexing-while-idle.md).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, TypeAlias

from ..tree import Source
from .history_index import REACH
from .history_store import HistoryStore
from .interface import EARLIER_CONVERSATIONS, Agreement, Candidate, bucket

_MAX_CANDIDATES: Final = 3

Tail: TypeAlias = tuple[int, ...]
"""The last tokens of a sequence, up to `REACH`."""
_IDLE_S: Final = 0.25
"""Seconds without an answer after which the engine counts as idle."""
_PATIENCE_S: Final = 2.0
"""Seconds to wait for that; then it is indexed beside the answers."""
_REST: Final = 100
"""Seconds of rest for each second of processor time."""
_FEW_TOKENS: Final = 200_000
"""So many are always indexed at the end, which takes a tenth of a second."""
_WORTH: Final = 16
"""More are indexed at the end if at least one in so many is new."""


class HistoryDrafter:
    """Proposes the tokens that followed the longest matches of the end of the sequence in a store's sequences.

    A fixed number of places is examined, so that a lookup takes the same time in any store; of a short match, which has
    many places, they are a sample. Before a store has an index there are no candidates. An index that is made during an
    answer is used from the next `reset`, which begins the next answer.

    Args:
        store: earlier sequences of the model.
        vocab_size: vocabulary size; larger token ids in the store are not proposed.
    """

    source: Final = Source.HISTORY
    prior: Final = EARLIER_CONVERSATIONS

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
        """Up to three: tokens that followed the longest match, most frequent first, then those of shorter ones."""
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
            agreement = _agreement(counts, places)
            for token in sorted(new, key=counts.__getitem__, reverse=True):
                candidates.append(Candidate(token, bucket(len(state) - missing, agreement, len(candidates))))
                if len(candidates) == _MAX_CANDIDATES:
                    return candidates
            new.clear()
        return candidates


def _agreement(counts: dict[int, int], places: int) -> Agreement:
    if len(counts) == 1:
        return Agreement.ONCE if places == 1 else Agreement.ALWAYS
    return Agreement.MOSTLY if 2 * max(counts.values()) > places else Agreement.SPLIT


class _StoppedError(Exception):
    """The indexer was closed while it worked."""


class HistoryIndexer:
    """Keeps the index of a store up to date. The thread exists while something is left to index.

    Args:
        store: the store.
    """

    def __init__(self, store: HistoryStore) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._answers = 0
        """Number of answers being generated."""
        self._closed = False
        self._stored_at: float | None = None
        """When the first conversation was stored that is not indexed yet; None if there is none."""
        self._idle_since = self._rested_at = self._patient_until = 0.0
        self._interrupted = False

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Put indexing off during the block, for two seconds at most."""
        with self._changed:
            self._answers += 1
        try:
            yield
        finally:
            with self._changed:
                self._answers -= 1
                self._idle_since = time.monotonic()
                self._changed.notify()

    def conversation_stored(self) -> None:
        """Index the store soon; returns at once."""
        with self._changed:
            if self._stored_at is None:
                self._stored_at = time.monotonic()
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, name="edge-run history", daemon=True)
                # Where no thread can be started, the store is indexed at the end.
                with suppress(RuntimeError):
                    thread.start()
                    self._thread = thread

    def close(self) -> None:
        """Stop the thread, which takes one short step. Index what is worth it, unless the thread was at it.

        What is left unindexed will be indexed by a later process.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()
        if self._interrupted:
            return
        new, index = self._store.unindexed_tokens(), self._store.index
        total = new + (0 if index is None else len(index))
        if new and (total <= _FEW_TOKENS or new * _WORTH >= total):
            self._store.reindex()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                started = time.thread_time()
                self._store.reindex(self._pause)
                self._rested_at = time.monotonic() + _REST * (time.thread_time() - started)
        except _StoppedError:
            self._interrupted = True

    def _wait_for_work(self) -> bool:
        """Wait until it is time to index; False if there is nothing to index or the indexer was closed."""
        with self._changed:
            while not self._closed:
                if self._stored_at is None:
                    self._thread = None
                    return False
                latest = self._stored_at + _PATIENCE_S
                due = latest if self._answers else min(self._idle_since + _IDLE_S, latest)
                now = time.monotonic()
                wait_s = max(due, self._rested_at) - now
                if wait_s <= 0:
                    self._stored_at = None
                    self._patient_until = now + _PATIENCE_S
                    return True
                self._changed.wait(wait_s)
            return False

    def _pause(self) -> None:
        """Wait while an answer is generated, but not for ever.

        Raises:
            _StoppedError: the indexer was closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._answers, self._patient_until - time.monotonic())
            if self._closed:
                raise _StoppedError
