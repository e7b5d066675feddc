"""Whose turn it is: one answer is written at a time, the others wait in line.

An answer takes its turn when its first chunk is asked for and gives it back with its last one, or when it is closed or
forgotten. Waiting can be cancelled, and an owner that would wait for itself is told so instead.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Final, TypeAlias

from ..errors import EdgeError
from .decode import FinishReason
from .result import Chunk, Stats

Start: TypeAlias = Callable[[Callable[[], bool]], Generator[Chunk, None, None]]
"""Begins to write an answer, asking the given function before every pass whether to stop."""

_POLL_S: Final = 0.05


class AnswerStream(Iterator[Chunk]):
    """An answer being written: iterate for its chunks. `cancel` may be called from any thread."""

    def __init__(self, turns: RequestQueue, start: Start) -> None:
        self._turns = turns
        self._start = start
        self._chunks: Generator[Chunk, None, None] | None = None
        self._ended = False
        self._key = object()
        self._cancelled = threading.Event()
        self.task: int | None = None
        """The asyncio task that reads this stream, if one does; otherwise the reading thread owns it."""
        self._thread = threading.get_ident()

    @property
    def owner(self) -> tuple[str, int]:
        """Who would wait for himself if he asked for another answer now."""
        return ("thread", self._thread) if self.task is None else ("task", self.task)

    @property
    def cancelled(self) -> bool:
        """Whether the answer is to end."""
        return self._cancelled.is_set()

    def __next__(self) -> Chunk:
        """The next chunk.

        Raises:
            EdgeError: the engine is closed, or the reader is in the middle of another answer.
        """
        if self._ended:
            raise StopIteration
        self._thread = threading.get_ident()
        if self._chunks is None:
            if not self._turns.take(self, self._key):
                self._ended = True
                return Chunk("", FinishReason.CANCELLED, Stats())
            self._chunks = self._start(self._cancelled.is_set)
        try:
            chunk = next(self._chunks)
        except BaseException:
            self._end()
            raise
        if chunk.finish_reason is not None:
            self.close()
        return chunk

    def cancel(self) -> None:
        """End the answer after its current pass; what was written stays."""
        self._cancelled.set()

    def close(self) -> None:
        """Abandon the answer and let the next one have its turn; does nothing when it has ended."""
        self.cancel()
        if self._chunks is not None:
            # Another thread is computing a chunk: it will see the cancellation, end the answer and give the turn back.
            with suppress(ValueError):
                self._chunks.close()
                self._end()
        else:
            self._ended = True

    def __del__(self) -> None:
        self.close()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._turns.give_back(self._key)


class RequestQueue:
    """The line in front of one engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # A stream that its reader forgets has to be collected, and its turn with it: nothing here keeps it alive.
        self._stream: weakref.ref[AnswerStream] | None = None
        self._key: object | None = None
        self._closed = False

    @property
    def _current(self) -> AnswerStream | None:
        """The answer being written."""
        stream = self._stream
        return None if stream is None else stream()

    def take(self, answer: AnswerStream, key: object) -> bool:
        """Wait for the turn, to be given back with `key`; False when the answer was cancelled before it came.

        Raises:
            EdgeError: the engine is closed, or the answer's reader holds the turn himself.
        """
        while not answer.cancelled:
            self._refuse_waiting_for_oneself(answer.owner)
            if self._lock.acquire(timeout=_POLL_S):
                if self._closed:
                    self._lock.release()
                    raise EdgeError("this engine is closed", "load the model again")
                self._stream, self._key = weakref.ref(answer), key
                return True
        return False

    def give_back(self, key: object) -> None:
        """End the turn that was taken with `key`."""
        if self._key is key:
            self._stream = self._key = None
            self._lock.release()

    @contextmanager
    def between(self) -> Iterator[None]:
        """A block in which no answer is being written.

        Raises:
            EdgeError: this thread is in the middle of an answer.
        """
        owner = ("thread", threading.get_ident())
        while True:
            self._refuse_waiting_for_oneself(owner)
            if self._lock.acquire(timeout=_POLL_S):
                break
        try:
            yield
        finally:
            self._lock.release()

    def cancel(self) -> None:
        """End the answer being written, if there is one."""
        if (current := self._current) is not None:
            current.cancel()

    def close(self) -> None:
        """End the answer being written and let no other begin."""
        self._closed = True
        if (current := self._current) is not None:
            current.close()
        with self._lock:
            pass

    def _refuse_waiting_for_oneself(self, owner: tuple[str, int]) -> None:
        current = self._current
        if current is not None and current.owner == owner:
            raise EdgeError("the reader is in the middle of another answer", "finish or close that stream first")
