"""Indexes stored conversations in the background, while no answer is generated.

A process drafts from its own earlier conversations once they are indexed. A thread does that when an answer has been
stored and the next one has not begun for a moment. It works in short steps, waits between them while an answer is
generated, and rests a hundred times as long as it worked. Where answers follow each other without a break it works
beside them, so that it takes at most a hundredth of one core (docs/decisions/0035-indexing-while-idle.md).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from .history_store import HistoryStore

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
