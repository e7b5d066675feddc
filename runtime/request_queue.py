"""The request queue of an engine: one answer is generated at a time, the others wait.

An answer acquires the engine when its first chunk is read. It releases the engine with its last chunk, or when it is
closed or garbage-collected. Waiting can be cancelled; waiting that would deadlock raises an error instead.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ..errors import EdgeError
from .decode import FinishReason
from .result import Chunk, Stats

if TYPE_CHECKING:
    from asyncio import Task

Start: TypeAlias = Callable[[Callable[[], bool]], Generator[Chunk, None, None]]
"""Begins to generate an answer; the given function is called before every pass and says whether to stop."""

Reader: TypeAlias = "int | weakref.ref[Task[Any]]"
"""Who reads a stream: the id of a thread, or an asyncio task."""

_POLL_S: Final = 0.05


class AnswerStream(Iterator[Chunk]):
    """An answer being generated: iterate over its chunks. `cancel` may be called from any thread."""

    def __init__(self, queue: RequestQueue, start: Start) -> None:
        self._queue = queue
        self._start = start
        self._chunks: Generator[Chunk, None, None] | None = None
        self._ended = False
        self._key = object()
        self._cancelled = threading.Event()
        self.task: weakref.ref[Task[Any]] | None = None
        """The asyncio task that reads this stream; None if a thread reads it."""
        self._thread = threading.get_ident()

    @property
    def reader(self) -> Reader:
        """The thread or asyncio task that reads this stream."""
        return self._thread if self.task is None else self.task

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled.is_set()

    def __next__(self) -> Chunk:
        """Return the next chunk; the first call waits for the engine.

        Raises:
            EdgeError: the engine is closed, or the reader has not finished another answer of the same engine, which
                would deadlock.
        """
        if self._ended:
            raise StopIteration
        self._thread = threading.get_ident()
        if self._chunks is None:
            if not self._queue.acquire(self, self._key):
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
        """End the answer after its current pass; what was generated stays."""
        self._cancelled.set()

    def close(self) -> None:
        """Abandon the answer and release the engine; does nothing when the answer has ended."""
        self.cancel()
        if self._chunks is not None:
            # Where another thread is computing a chunk, that thread sees the cancellation and releases the engine.
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
            self._queue.release(self._key)


class AsyncAnswerStream(AsyncIterator[Chunk]):
    """An answer being generated, for asyncio: one worker thread decodes it.

    An answer that is left early is cancelled: when its task is cancelled, when the stream is closed with `aclose`, or
    when it is garbage-collected, which is right after an `async for` that was left. The engine is free again then.
    """

    def __init__(self, start: Callable[[], AnswerStream]) -> None:
        """Prepare the answer that `start` opens in the worker."""
        # Importing asyncio takes a tenth of the package's import time.
        from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415

        self._start = start
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="edge-run")
        self._answer: AnswerStream | None = None
        self._ended = False

    async def __anext__(self) -> Chunk:
        """Return the next chunk.

        Raises:
            EdgeError: as `AnswerStream.__next__`.
        """
        import asyncio  # noqa: PLC0415

        if self._ended:
            raise StopAsyncIteration
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        try:
            if self._answer is None:
                self._answer = await loop.run_in_executor(self._worker, self._start)
            self._answer.task = None if task is None else weakref.ref(task)
            chunk = await loop.run_in_executor(self._worker, next, self._answer, None)
        except GeneratorExit:  # the task itself was dropped, and nothing can be awaited any more
            self._abandon()
            raise
        except BaseException:
            await self.aclose()
            raise
        if chunk is None:
            await self.aclose()
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        """Cancel the answer and wait until the engine is free again; does nothing when the answer has ended."""
        import asyncio  # noqa: PLC0415

        if self._ended:
            return
        self._ended = True
        answer, worker = self._answer, self._worker
        if answer is not None:
            answer.cancel()
            # From here on the worker is its reader, for whom the task may wait.
            answer.task = None
            # Closing waits behind the pass in progress in the same thread, so the two cannot collide. Another
            # cancellation of the task ends the waiting and not the closing.
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(worker, answer.close))
        worker.shutdown(wait=False)

    def __del__(self) -> None:
        self._abandon()

    def _abandon(self) -> None:
        """Cancel and close the answer without waiting; a pass in progress releases the engine when it ends."""
        if not self._ended:
            self._ended = True
            if self._answer is not None:
                self._answer.close()


class RequestQueue:
    """Gives one engine to one answer at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # A weak reference: a stream that its reader drops is garbage-collected, and releases the engine.
        self._stream: weakref.ref[AnswerStream] | None = None
        self._key: object | None = None
        self._closed = False

    @property
    def _current(self) -> AnswerStream | None:
        """The answer being generated."""
        stream = self._stream
        return None if stream is None else stream()

    def acquire(self, answer: AnswerStream, key: object) -> bool:
        """Wait for the engine, to be released with `key`; False when the answer was cancelled while it waited.

        Raises:
            EdgeError: the engine is closed, or the answer's reader holds it already.
        """
        while not answer.cancelled:
            self._check_deadlock(answer.reader)
            if self._lock.acquire(timeout=_POLL_S):
                if self._closed:
                    self._lock.release()
                    raise EdgeError("this engine is closed", "load the model again")
                self._stream, self._key = weakref.ref(answer), key
                return True
        return False

    def release(self, key: object) -> None:
        """Release the engine if it was acquired with `key`."""
        if self._key is key:
            self._stream = self._key = None
            self._lock.release()

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Wait until no answer is being generated, and keep others waiting for the length of the `with` block.

        Raises:
            EdgeError: this thread has not finished an answer, which would deadlock.
        """
        reader = threading.get_ident()
        while True:
            self._check_deadlock(reader)
            if self._lock.acquire(timeout=_POLL_S):
                break
        try:
            yield
        finally:
            self._lock.release()

    def cancel(self) -> None:
        """End the answer being generated, if there is one."""
        if (current := self._current) is not None:
            current.cancel()

    def close(self) -> None:
        """End the answer being generated and refuse all others."""
        self._closed = True
        if (current := self._current) is not None:
            current.close()
        with self._lock:
            pass

    def _check_deadlock(self, reader: Reader) -> None:
        """Raise if `reader`, which is about to wait, holds the engine itself."""
        current = self._current
        if current is not None and current.reader == reader:
            raise EdgeError("the reader is in the middle of another answer", "finish or close that stream first")
