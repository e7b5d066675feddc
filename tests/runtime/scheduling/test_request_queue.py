"""Concurrent answers of one engine: threads, asyncio tasks, cancelling."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path

import pytest

import edgerun
from edgerun import (
    EdgeError,
    Engine,
    FinishReason,
    GenerateOptions,
)


def test_cancelling_from_another_thread_keeps_the_text_so_far(engine: Engine) -> None:
    stream = engine.stream("the", temperature=1.0, seed=1, raw=True)
    next(stream)
    canceller = threading.Thread(target=engine.cancel)
    canceller.start()
    canceller.join()
    last = list(stream)[-1]
    assert last.finish_reason is FinishReason.CANCELLED
    assert engine.generate("the", max_tokens=3).finish_reason is FinishReason.LENGTH


def test_answers_of_several_threads_wait_for_each_other(engine: Engine) -> None:
    expected = engine.generate("the", max_tokens=12).text
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda: texts.append(engine.generate("the", max_tokens=12).text)) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [expected] * 6


def test_an_answer_inside_an_unfinished_one_raises_instead_of_deadlocking(single: Engine) -> None:
    stream = single.stream("the", max_tokens=5)
    next(stream)
    with pytest.raises(EdgeError, match="the reader is in the middle of another answer"):
        single.generate("other")
    stream.close()
    assert single.generate("the", max_tokens=5).text


def test_an_answer_whose_cache_does_not_fit_beside_the_others_waits(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with edgerun.load(tiny_bundle, threads=1) as engine:
        token_bytes = engine.graph_io.cache_bytes_per_token
    monkeypatch.setattr("edgerun.runtime.loaded_model.available_memory", lambda: 2 * 100 * token_bytes)
    with edgerun.load(tiny_bundle, threads=1, prefix_cache=0) as engine:
        first, second, third = (
            engine.stream("the", raw=True, max_tokens=count, ignore_eos=True) for count in (80, 30, 10)
        )
        next(first)
        for stream in (second, third):
            stream.start()
        assert (engine.activity().active, engine.activity().waiting) == (1, 2)
        with pytest.raises(EdgeError, match="the reader is in the middle of another answer"):
            next(second)
        first.close()
        assert engine.activity().waiting == 0
        assert list(third)[-1].completion_tokens == 10


def test_a_waiting_answer_continues_from_the_cache_of_the_one_that_it_waited_for(engine: Engine) -> None:
    """Only from its finished cache, although its prompt begins with the text of the running answer."""
    ids = list(range(30, 40))
    options = GenerateOptions(max_tokens=10)
    first = engine.model.new_sequence()
    list(engine.model.answer(first, ids, options))
    continuation = first.token_ids[:-2]
    expected = "".join(chunk.text for chunk in engine.model.answer(engine.model.new_sequence(), continuation, options))
    running = engine.model.answer(None, ids, options)
    next(running)
    waiting = engine.model.answer(None, continuation, options)
    list(running)
    chunks = list(waiting)
    assert "".join(chunk.text for chunk in chunks) == expected
    assert chunks[-1].stats.reused_tokens == len(continuation) - 1


def test_cancelling_before_the_first_chunk_ends_the_answer(engine: Engine) -> None:
    stream = engine.stream("the")
    stream.cancel()
    (chunk,) = stream
    assert chunk.finish_reason is FinishReason.CANCELLED
    assert engine.generate("the", max_tokens=2).text


def test_a_stream_can_be_continued_in_another_thread(engine: Engine) -> None:
    stream = engine.stream("the", max_tokens=20)
    next(stream)
    rest: list[object] = []
    reader = threading.Thread(target=lambda: rest.extend(stream))
    reader.start()
    reader.join()
    assert rest
    assert engine.generate("the", max_tokens=2).text


def test_a_garbage_collected_stream_releases_the_engine(engine: Engine) -> None:
    stream = engine.stream("the", max_tokens=20)
    next(stream)
    del stream
    gc.collect()
    assert engine.generate("the", max_tokens=2).text


def test_closing_the_engine_ends_a_suspended_answer(tiny_bundle: Path) -> None:
    engine = edgerun.load(tiny_bundle)
    stream = engine.stream("the", raw=True)
    next(stream)
    engine.close()
    assert list(stream) == []


def test_async_methods_give_the_same_text(engine: Engine) -> None:
    expected = engine.generate("the", max_tokens=12).text

    async def both() -> tuple[str, str]:
        reply = await engine.agenerate("the", max_tokens=12)
        return reply.text, "".join([chunk.text async for chunk in engine.astream("the", max_tokens=12)])

    assert asyncio.run(both()) == (expected, expected)


def test_cancelling_a_waiting_task_does_not_disturb_the_running_answer(single: Engine) -> None:
    expected = single.generate("the", max_tokens=20).text
    running = single.stream("the", max_tokens=20)
    text = next(running).text

    async def queue_and_cancel() -> None:
        queued = asyncio.create_task(single.agenerate("other", max_tokens=5))
        await asyncio.sleep(0.1)
        assert not queued.done()
        queued.cancel()
        with pytest.raises(asyncio.CancelledError):
            await queued

    asyncio.run(asyncio.wait_for(queue_and_cancel(), 120))
    assert text + "".join(chunk.text for chunk in running) == expected


def test_an_answer_inside_an_unfinished_asyncio_stream_follows_it(single: Engine) -> None:
    """The stream is decoded to its end although nobody takes its chunks meanwhile."""
    expected = single.generate("the", max_tokens=5).text

    async def scenario() -> None:
        stream = single.astream("the", max_tokens=5)
        first = await anext(stream)
        assert (await single.agenerate("other", max_tokens=2)).text
        assert first.text + "".join([chunk.text async for chunk in stream]) == expected

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_an_asyncio_stream_that_an_error_leaves_makes_room_for_the_next_answer(engine: Engine) -> None:
    async def fail() -> None:
        async for _ in engine.astream("the", max_tokens=50):
            raise LookupError

    async def scenario() -> None:
        for _ in range(10):
            with pytest.raises(LookupError):
                await fail()
            assert (await engine.agenerate("the", max_tokens=3)).text

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_cancelled_tasks_leave_the_engine_free(engine: Engine) -> None:
    """Tasks are cancelled while they wait, while a pass runs, and twice."""
    expected = engine.generate("the", max_tokens=3).text

    async def scenario() -> None:
        for number in range(40):
            tasks = [asyncio.create_task(engine.agenerate("the", max_tokens=200, raw=True)) for _ in range(3)]
            await asyncio.sleep(0.001 * (number % 5))
            for task in tasks:
                task.cancel()
            if number % 2:
                await asyncio.sleep(0)
                tasks[0].cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            # A stream is decoded ahead, so a short answer may be there before its task is cancelled.
            assert all(isinstance(each, asyncio.CancelledError | edgerun.Reply) for each in ended)
            assert (await engine.agenerate("the", max_tokens=3)).text == expected

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_event_loops_of_two_threads_share_an_engine(engine: Engine) -> None:
    expected = engine.generate("the", max_tokens=5).text
    texts: list[str] = []

    async def ask() -> None:
        for _ in range(10):
            async for _ in engine.astream("the", max_tokens=50):
                break
            texts.append((await engine.agenerate("the", max_tokens=5)).text)

    threads = [threading.Thread(target=lambda: asyncio.run(ask())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert texts == [expected] * 20


def test_a_loop_that_ends_in_the_middle_of_an_answer_leaves_the_engine_free(engine: Engine) -> None:
    """With a stream that is still referred to, and with a task that is dropped while a pass runs."""
    loop = asyncio.new_event_loop()
    stream = engine.astream("the", max_tokens=50)
    loop.run_until_complete(anext(stream))
    loop.close()
    del stream
    assert engine.generate("the", max_tokens=3).text

    async def wait_for_nothing(stream: AsyncGenerator[edgerun.Chunk, None]) -> None:
        pending = stream.__anext__()
        with suppress(StopIteration):  # the first chunk may be there already
            pending.send(None)
        pending.close()

    asyncio.run(wait_for_nothing(engine.astream("the", max_tokens=50)))
    assert engine.generate("the", max_tokens=3).text
