"""Streams of the chunks of one answer, for threads and for asyncio.

An answer enters the queue of its engine when its first chunk is read, or before, with `start`. It gives up its place
with its last chunk, or when it is closed or garbage-collected.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, MutableMapping
from contextlib import suppress
from functools import partial
from typing import Final, TypeAlias

from ...errors import InputError
from ..decode import FinishReason
from ..result import Chunk, Stats
from ..tools.answer_parts import AnswerParts
from .request_queue import Chunks, RequestQueue, Ticket
from .request_run import LoopQueue, Run

Generate: TypeAlias = Callable[[Ticket], Chunks]
"""Begins to generate an answer, which calls `RequestQueue.yield_turn` before every pass."""


class AnswerStream(Iterator[Chunk]):
    """An answer being generated: iterate over its chunks. `cancel` may be called from any thread.

    Args:
        queue: queue of the engine.
        generate: begins to generate the answer.
        owner: what only one answer may use at a time; see `Ticket`.
        cache_bytes: expected size of the KV caches.
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
        cache_bytes: int = 0,
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
        self._ticket = Ticket(self, owner, cache_bytes)
        self._choices: Final = choices
        self._unfinished = choices
        self._chunks: Chunks | None = None
        self._entered = False
        self.waited_s = 0.0
        """Seconds that the reader waited for a place."""
        self._ended = False
        self.reader = threading.get_ident()
        """The thread that reads this stream."""

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
        self.reader = threading.get_ident()
        try:
            if self._chunks is None:
                began = time.perf_counter()
                self.start()
                has_place = self._queue.wait_for_place(self._ticket, self.reader)
                self.waited_s = time.perf_counter() - began
                if not has_place:
                    self._queue.leave(self._ticket)
                    self._chunks = _nothing(self._unfinished)
            with self._queue.turn_of(self._ticket):
                if self._chunks is None:
                    # What generates must not refer to this stream, which is dropped with its last reference.
                    self._chunks = self._generate(self._ticket)
                chunk = next(self._chunks)
        except BaseException:
            self._end()
            raise
        if chunk.finish_reason is not None:
            self._unfinished -= 1
            if not self._unfinished:
                self.close()
        return chunk

    def end_older(self, latest: MutableMapping[str, AnswerStream], document: str) -> None:
        """End the latest stream of a document, and be the latest one."""
        if (older := latest.get(document)) is not None:
            older.cancel()
        latest[document] = self

    def cancel(self, index: int | None = None) -> None:
        """End the answer after its current pass; what was generated stays.

        Args:
            index: which one of several answers to end; None for all of them. What is generated for `best_of`, or once
                for several equal answers, ends as a whole.

        Raises:
            InputError: there is no such answer.
        """
        if index is not None and not 0 <= index < self._choices:
            raise InputError(f"there is no answer {index}", f"the request has {self._choices}, counted from 0")
        if index is None or self._choices == 1:
            self._ticket.cancelled = True
        else:
            self._ticket.ended.add(index)

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


async def read_async(start: Callable[[], AnswerStream]) -> AsyncGenerator[Chunk, None]:
    """The chunks of an answer, for asyncio: a thread decodes it from the first one on, as fast as it can.

    An answer that is left early is cancelled: when its task is cancelled, when the generator is closed with `aclose`,
    or when it is garbage-collected, which is right after an `async for` that was left.

    Args:
        start: opens the stream, in the thread.

    Raises:
        EdgeError: as `AnswerStream.__next__`.
    """
    queue: LoopQueue[Chunk] = LoopQueue()
    run = Run(partial(_read, start), "edge-run", queue)
    run.start()
    taking = False
    try:
        while True:
            taking = True
            chunks = await queue.take()
            taking = False
            if not chunks:
                return
            for chunk in chunks:
                yield chunk
    except BaseException as error:
        run.cancellation.cancel()
        # Where the task itself was dropped, nothing can be awaited any more.
        if not (taking and isinstance(error, GeneratorExit)):
            with suppress(Exception):
                while await queue.take():  # until its place is free
                    pass
        raise


def _read(start: Callable[[], AnswerStream], run: Run[Chunk]) -> None:
    """Hand all chunks of an answer to a run."""
    with run.cancellation.reading(start()) as stream:
        for chunk in stream:
            run.put(chunk)
