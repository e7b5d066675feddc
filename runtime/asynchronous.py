"""Streams for asyncio: the decoding stays in a worker thread, the event loop stays free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor

from .reply import Chunk


async def stream_in_thread(
    start: Callable[[], Generator[Chunk, None, None]], cancel: Callable[[], None]
) -> AsyncIterator[Chunk]:
    """Run the stream that `start` opens in one worker thread and yield its chunks.

    When the consumer stops early or its task is cancelled, `cancel` is called and the stream closed before this
    returns, so the engine is free again.
    """
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="edge-run") as worker:
        chunks = await loop.run_in_executor(worker, start)
        try:
            while (chunk := await loop.run_in_executor(worker, next, chunks, None)) is not None:
                yield chunk
        except (asyncio.CancelledError, GeneratorExit):
            cancel()
            raise
        finally:
            # Leaving the pool waits for its thread; closing there, after the pass in progress, cannot collide with it.
            worker.submit(chunks.close)
