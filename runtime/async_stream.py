"""Streams for asyncio: the decoding stays in a worker thread, the event loop stays free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

from .request_queue import AnswerStream
from .result import Chunk


async def stream_in_thread(start: Callable[[], AnswerStream]) -> AsyncIterator[Chunk]:
    """Run the stream that `start` opens in one worker thread and yield its chunks.

    When the consumer stops early or its task is cancelled, the answer is cancelled and closed before this returns, so
    the engine is free again; an answer that was still waiting for its turn leaves the line.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="edge-run")
    answer: AnswerStream | None = None
    try:
        answer = await loop.run_in_executor(worker, start)
        answer.task = id(task)
        while (chunk := await loop.run_in_executor(worker, next, answer, None)) is not None:
            yield chunk
    finally:
        if answer is not None:
            answer.cancel()
            # Closing waits behind the pass in progress in the same thread, so the two cannot collide.
            await asyncio.shield(loop.run_in_executor(worker, answer.close))
        worker.shutdown(wait=False)
