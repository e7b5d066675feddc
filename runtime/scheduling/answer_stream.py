"""Streams of the chunks of one answer, for threads and for asyncio.

An answer enters the queue of its engine when its first chunk is read, or before, with `start`. It gives up its place
with its last chunk, or when it is closed or garbage-collected.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from ...errors import InputError
from ..decode import FinishReason
from ..result import Chunk, Stats
from ..tools.answer_parts import AnswerParts
from .request_queue import Chunks, Reader, RequestQueue, Ticket

if TYPE_CHECKING:
    from asyncio import Task


class IsCancelled(Protocol):
    """To be called before every pass: lets other answers run theirs, and returns whether to stop."""

    def __call__(self, *indices: int) -> bool:
        """Return whether to stop: because the request was cancelled, or one of these answers of several."""


Generate: TypeAlias = Callable[[IsCancelled], Chunks]
"""Begins to generate an answer."""


class AnswerStream(Iterator[Chunk]):
    """An answer being generated: iterate over its chunks. `cancel` may be called from any thread.

    Args:
        queue: queue of the engine.
        generate: begins to generate the answer.
        owner: what only one answer may use at a time; see `Ticket`.
        choices: number of answers to the prompt, each of which has a last chunk.
        start_text: see the attribute.
        start_parts: see the attribute; None for text alone.
    """

    def __init__(
        self,
        queue: RequestQueue,
        generate: Generate,
        owner: object | None = None,
        *,
        choices: int = 1,
        start_text: str = "",
        start_parts: AnswerParts | None = None,
    ) -> None:
        self.start_text: Final = start_text
        """Text of the tokens that the answer begins with (`GenerateOptions.answer_start`), which the chunks do not
        repeat. Of a character at its end that is not complete the chunks have the whole."""
        self.start_parts: Final = start_parts or AnswerParts(start_text)
        """The parts of that text, as the chunks have those of what follows."""
        self._queue = queue
        self._generate = generate
        self._ticket = Ticket(self, owner)
        self._choices: Final = choices
        self._cancelled: Final[set[int]] = set()
        """The answers that are to end, of several."""
        self._unfinished = choices
        self._chunks: Chunks | None = None
        self._entered = False
        self._ended = False
        self.task: weakref.ref[Task[Any]] | None = None
        """The asyncio task that reads this stream; None if a thread reads it."""
        self._thread = threading.get_ident()

    @property
    def reader(self) -> Reader:
        """The thread or asyncio task that reads this stream."""
        return self._thread if self.task is None else self.task

    def start(self) -> None:
        """Enter the queue of the engine, which the first chunk would do too; returns at once.

        Raises:
            BusyError: too many requests wait already.
            EdgeError: the engine is closed.
        """
        if not self._entered and not self._ended:
            self._queue.enter(self._ticket)
            self._entered = True

    def __next__(self) -> Chunk:
        """Return the next chunk; the first call waits for a place.

        Raises:
            BusyError: too many requests wait already.
            EdgeError: the engine is closed, or waiting for it would deadlock, because its reader, or those of the
                answers that have the places, have not finished another answer of it.
        """
        if self._ended:
            raise StopIteration
        self._thread = threading.get_ident()
        try:
            if self._chunks is None:
                self.start()
                if not self._queue.wait_for_place(self._ticket, self.reader):
                    self._queue.leave(self._ticket)
                    self._chunks = _nothing(self._unfinished)
            with self._queue.turn_of(self._ticket):
                if self._chunks is None:
                    # What generates must not refer to this stream, which is dropped with its last reference.
                    queue, ticket, ended = self._queue, self._ticket, self._cancelled
                    self._chunks = self._generate(
                        lambda *indices: queue.pass_turn(ticket) or not ended.isdisjoint(indices)
                    )
                chunk = next(self._chunks)
        except BaseException:
            self._end()
            raise
        if chunk.finish_reason is not None:
            self._unfinished -= 1
            if not self._unfinished:
                self.close()
        return chunk

    def cancel(self, index: int | None = None) -> None:
        """End the answer after its current pass; what was generated stays.

        Args:
            index: which one of several answers to end; None for all of them. The next one begins then. What is
                generated for `best_of`, or once for several equal answers, ends as a whole.

        Raises:
            InputError: there is no such answer.
        """
        if index is not None and not 0 <= index < self._choices:
            raise InputError(f"there is no answer {index}", f"the request has {self._choices}, counted from 0")
        if index is None or self._choices == 1:
            self._ticket.cancel()
        else:
            self._cancelled.add(index)

    def close(self) -> None:
        """Abandon the answer and give up its place; does nothing when the answer has ended."""
        self.cancel()
        if self._ended:
            return
        if self._chunks is not None:
            # Where another thread is in the middle of a chunk, it sees the cancellation, and ends the answer.
            with suppress(ValueError), self._queue.turn():
                self._chunks.close()
                self._end()
        else:
            self._end()

    def drop(self) -> None:
        """Abandon the answer without waiting for a pass in progress, after which its place is free."""
        if not self._ended:
            self._ended = True
            self._queue.drop(self._ticket, self._chunks)

    def __del__(self) -> None:
        self.drop()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._queue.leave(self._ticket)


def _nothing(choices: int) -> Chunks:
    """The chunks of a request that was cancelled while it waited."""
    for index in range(choices):
        yield Chunk("", FinishReason.CANCELLED, Stats(), index=index)


class AsyncAnswerStream(AsyncIterator[Chunk]):
    """An answer being generated, for asyncio: one worker thread decodes it.

    An answer that is left early is cancelled: when its task is cancelled, when the stream is closed with `aclose`, or
    when it is garbage-collected, which is right after an `async for` that was left. Its place is free again then.
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
        """Cancel the answer and wait until its place is free again; does nothing when the answer has ended."""
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
        """Cancel and drop the answer without waiting; a pass in progress gives up its place when it ends."""
        if not self._ended:
            self._ended = True
            if self._answer is not None:
                self._answer.drop()
