"""Several answers at a time say what each would say alone, whatever they share."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import edgerun
from edgerun import AnswerStream, BusyError, EdgeError, Engine, FinishReason, GenerateOptions, InputError, Reply
from edgerun.runtime.graph.bound_session import BoundSession
from edgerun.runtime.scheduling.request_queue import Ticket
from edgerun.runtime.speculation.choice import DraftSampling, Speculation
from support.adversarial_drafters import NEARLY_FREE, FixedCost
from support.layouts import LAYOUTS, write_layout
from support.nightly import some_nightly
from support.waiting import wait_until

CONTEXT = 200
OPTIONS = (
    GenerateOptions(max_tokens=24),
    GenerateOptions(max_tokens=24, temperature=0.9, seed=3),
    GenerateOptions(max_tokens=12, temperature=0.7, top_p=0.9, repeat_penalty=1.2, seed=4),
    GenerateOptions(max_tokens=16, exact=True),
    GenerateOptions(max_tokens=16, speculation=Speculation.OFF),
    GenerateOptions(max_tokens=24, stop=" the"),
)


def loaded(bundle: Path, **options: Any) -> Engine:
    """An engine for which every draft token pays."""
    engine = edgerun.load(bundle, threads=1, context=CONTEXT, cache=False, **options)
    engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
    return engine


def prompts(rng: random.Random, vocab_size: int) -> list[list[int]]:
    """Prompts of which some have the same beginning, and one is there twice."""
    system = [rng.randrange(5, vocab_size) for _ in range(30)]
    made = [[rng.randrange(5, vocab_size) for _ in range(rng.choice((3, 40, 150)))] for _ in range(2)]
    made += [[*system, *(rng.randrange(5, vocab_size) for _ in range(rng.randint(1, 20)))] for _ in range(3)]
    return [*made, made[-1]]


def check_schedule(engine: Engine, alone: Engine, rng: random.Random, answers: int) -> int:
    """Read several answers in a random order, leave some early, and compare the others with those of an engine that
    does nothing else; returns the greatest number of answers that ran at a time."""
    asked = prompts(rng, engine.graph_io.vocab_size)
    reading: list[tuple[AnswerStream, list[int], GenerateOptions, list[edgerun.Chunk]]] = []
    most = 0
    while answers or reading:
        if answers and (not reading or (len(reading) < engine.model.queue.parallel and rng.random() < 0.2)):
            answers -= 1
            prompt, options = rng.choice(asked), rng.choice(OPTIONS)
            reading.append((engine.model.answer(None, prompt, options), prompt, options, []))
        number = rng.randrange(len(reading))
        stream, prompt, options, chunks = reading[number]
        most = max(most, engine.activity().active)
        chance = rng.random()
        if chance < 0.02:
            stream.close()
            del reading[number]
        elif chance < 0.04:
            stream.cancel()
            # The bytes of a character that is not complete come at the end.
            text = "".join(chunk.text for chunk in (*chunks, *stream)).rstrip("\ufffd")
            assert Reply.of(alone.model.answer(None, prompt, options)).text.startswith(text)
            del reading[number]
        elif chance < 0.06:
            del reading[number], stream  # nobody reads it any more
        elif (chunk := next(stream, None)) is not None:
            chunks.append(chunk)
        else:
            expected = Reply.of(alone.model.answer(None, prompt, options))
            reply = Reply.of(chunks)
            assert (reply.text, reply.finish_reason) == (expected.text, expected.finish_reason)
            del reading[number]
    assert engine.activity().active == 0
    return most


@pytest.mark.parametrize("seed", some_nightly(range(30), every=10))
@pytest.mark.parametrize("draft", [None, "qwen2", "itself"])
def test_answers_that_are_read_in_any_order_say_what_they_say_alone(
    tiny_bundle_of: Callable[[str, str], Path], seed: int, draft: str | None
) -> None:
    target = tiny_bundle_of("llama", "fp32")
    pair = {None: None, "itself": target}.get(draft) if draft != "qwen2" else tiny_bundle_of("qwen2", "fp32")
    with loaded(target, prefix_cache=0) as alone:
        budget = alone.model.new_sequence().arena.nbytes * (2, 0, 1000)[seed % 3]
        with loaded(target, draft=pair, prefix_cache=budget, parallel=3) as engine:
            assert check_schedule(engine, alone, random.Random(seed), 24) > 1


@pytest.mark.parametrize("name", ["optimum", "genai"])
def test_caches_of_foreign_layouts_alternate_too(name: str, tmp_path: Path) -> None:
    folder = write_layout(tmp_path / "model", LAYOUTS[name])
    with loaded(folder) as engine, loaded(folder, prefix_cache=0) as alone:
        assert check_schedule(engine, alone, random.Random(0), 12) > 1


def test_sampled_drafts_of_two_answers_stay_apart(tiny_bundle_of: Callable[[str, str], Path]) -> None:
    target = tiny_bundle_of("llama", "fp32")
    options = [
        GenerateOptions(max_tokens=30, temperature=1.0, seed=seed, draft_sampling=sampling)
        for seed, sampling in enumerate((DraftSampling.CHAIN, DraftSampling.TREE))
    ]
    with loaded(target, draft=target) as engine:
        streams = [engine.stream("the other", each) for each in options]
        first = [[next(stream)] for stream in streams]
        for _ in range(5):
            for stream, chunks in zip(streams, first, strict=True):
                chunks += [chunk for chunk in (next(stream, None),) if chunk is not None]
        for each, stream, chunks in zip(options, streams, first, strict=True):
            reply = Reply.of([*chunks, *stream])
            assert reply.stats.drafted > 0
            assert reply.stats.completion_tokens == each.max_tokens


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path) -> Iterator[Engine]:
    with loaded(tiny_bundle, parallel=2, max_waiting=1) as engine:
        yield engine


def test_threads_share_an_engine(engine: Engine) -> None:
    asked = [("the", 1), ("in the in the", 2), ("what is", 3), ("the", 1), ("and so on", 5), ("a", 6)]
    expected = {each: engine.generate(each[0], max_tokens=30, temperature=0.8, seed=each[1]).text for each in asked}
    wrong: list[object] = []

    def ask(number: int) -> None:
        for turn in range(6):
            prompt, seed = each = asked[(number + turn) % len(asked)]
            text = engine.generate(prompt, max_tokens=30, temperature=0.8, seed=seed).text
            if text != expected[each]:
                wrong.append((each, text))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_prompt_that_is_being_read_does_not_hold_up_another_answer(
    tiny_bundle_of: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two passes over the prompt, the other answer runs one."""
    reading, done, passes = threading.Event(), threading.Event(), list[threading.Thread]()
    run = BoundSession.run

    def counted(*args: Any) -> Any:
        passes.append(threading.current_thread())
        return run(*args)

    def progress(stage: str, fraction: float) -> None:
        if stage == "reading the prompt" and threading.current_thread() is reader:
            if fraction == 1:
                done.set()
                return
            reading.set()
            wait_until(lambda: bool(engine.model.queue._turns.waiting))

    with edgerun.load(tiny_bundle_of("llama", "fp32"), threads=1, cache=False, progress=progress) as engine:
        engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
        prompt = list(range(20, 230))
        reader = threading.Thread(target=lambda: list(engine.model.answer(None, prompt, GenerateOptions(max_tokens=1))))
        other = engine.stream("the", max_tokens=200, temperature=1.0, seed=1, ignore_eos=True, raw=True)
        next(other)
        monkeypatch.setattr(BoundSession, "run", counted)
        reader.start()
        reading.wait()
        while not done.is_set():
            next(other)
        reader.join()
        other.close()
    assert passes.count(reader) == 2
    first = passes.index(reader)
    assert passes[first + 1] is threading.current_thread()


def test_a_full_queue_refuses_at_once(engine: Engine) -> None:
    streams = [engine.stream("the", max_tokens=5) for _ in range(4)]
    for stream in streams[:3]:
        stream.start()
    load = engine.activity()
    assert (load.active, load.waiting) == (2, 1)
    with pytest.raises(BusyError, match="2 answers are being generated and 1 requests wait; try again later"):
        streams[3].start()
    with pytest.raises(BusyError):
        next(streams[3])
    streams[0].close()
    assert engine.activity().waiting == 0
    again = engine.stream("the", max_tokens=5)
    again.start()
    texts = {Reply.of(stream).text for stream in (*streams[1:3], again)}
    assert len(texts) == 1
    assert engine.activity().active == 0


def test_a_request_that_is_cancelled_while_it_waits_gives_up_its_place(engine: Engine) -> None:
    running = [engine.stream("the", max_tokens=5) for _ in range(2)]
    for stream in running:
        stream.start()
    waiting = engine.stream("the", max_tokens=5, n=3)
    waiting.start()
    waiting.cancel()
    assert [(chunk.index, chunk.finish_reason) for chunk in waiting] == [
        (index, FinishReason.CANCELLED) for index in range(3)
    ]
    assert engine.activity().waiting == 0
    for stream in running:
        assert Reply.of(stream).text


def test_a_stream_that_is_dropped_while_it_waits_gives_up_its_place(engine: Engine) -> None:
    running = [engine.stream("the", max_tokens=5) for _ in range(2)]
    waiting = engine.stream("the", max_tokens=5)
    for stream in (*running, waiting):
        stream.start()
    del waiting, stream
    assert engine.activity().waiting == 0
    del running
    assert engine.activity().active == 0


def test_two_answers_of_one_conversation_follow_each_other(engine: Engine) -> None:
    chat = engine.session()
    first = chat.stream("the other", max_tokens=8)
    next(first)
    with pytest.raises(EdgeError, match="the reader is in the middle of another answer"):
        chat.send("and", max_tokens=4)
    replies: list[Reply] = []
    second = threading.Thread(target=lambda: replies.append(chat.send("and", max_tokens=4)))
    second.start()
    rest = list(first)
    second.join()
    assert rest
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2
    assert chat.messages[3]["content"] == replies[0].text


def test_a_conversation_is_saved_while_another_answer_runs(engine: Engine, tmp_path: Path) -> None:
    chat = engine.session()
    chat.send("the", max_tokens=4)
    other = engine.stream("and", max_tokens=30)
    next(other)
    chat.save(tmp_path / "saved")
    assert list(other)[-1].finish_reason is not FinishReason.CANCELLED
    resumed = engine.session(resume=tmp_path / "saved")
    assert resumed.send("in", max_tokens=6).text == chat.send("in", max_tokens=6).text


def test_an_answer_cannot_close_its_engine(tiny_bundle: Path) -> None:
    engines: list[Engine] = []

    def progress(stage: str, fraction: float) -> None:
        if stage == "reading the prompt":
            engines[0].close()

    with edgerun.load(tiny_bundle, threads=1, progress=progress) as engine:
        engines.append(engine)
        with pytest.raises(EdgeError, match="the engine cannot be closed from within an answer; cancel the answer"):
            engine.generate("the")


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 2}, {"temperature": 1.0, "seed": (1 << 64) - 1}])
def test_several_answers_to_one_prompt_are_those_of_successive_seeds(engine: Engine, options: dict[str, Any]) -> None:
    reply = engine.generate("the other thing", max_tokens=20, n=3, **options)
    seeds = [(options.get("seed", 0) + index) % (1 << 64) for index in range(3)]
    for choice, seed in zip(reply.choices, seeds, strict=True):
        alone = engine.generate("the other thing", max_tokens=20, **{**options, "seed": seed})
        assert (choice.text, choice.finish_reason) == (alone.text, alone.finish_reason)
        assert choice.stats.completion_tokens == alone.stats.completion_tokens
    assert engine.activity().active == 0


def test_several_answers_share_what_their_prompt_has_in_the_cache(tiny_bundle_of: Callable[[str, str], Path]) -> None:
    with edgerun.load(tiny_bundle_of("llama", "fp32"), threads=1, cache=False, prefix_cache=0) as engine:
        prompt = list(range(20, 220))
        options = GenerateOptions(max_tokens=4, temperature=1.0, seed=1, n=3)
        reply = Reply.of(engine.model.answer(None, prompt, options))
        assert [choice.stats.reused_tokens for choice in reply.choices] == [0, 128, 128]


def test_leaving_several_answers_ends_them_all(engine: Engine) -> None:
    stream = engine.stream("the", max_tokens=20, n=4, temperature=1.0, seed=1, ignore_eos=True)
    while next(stream).index < 2:
        pass
    stream.close()
    assert engine.activity().active == 0
    assert engine.generate("the", max_tokens=3).text


def test_one_of_several_answers_is_cancelled(engine: Engine) -> None:
    options = GenerateOptions(max_tokens=20, n=3, temperature=1.0, seed=1, ignore_eos=True)
    expected = engine.generate("the", options)
    stream = engine.stream("the", options)
    first = next(stream)
    stream.cancel(0)
    stream.cancel(2)
    reply = Reply.of([first, *stream])
    assert [choice.finish_reason for choice in reply.choices] == ["cancelled", "length", "cancelled"]
    assert expected.text.startswith(reply.text)
    second, third = reply.alternatives
    assert second.text == expected.choices[1].text
    assert third.text != expected.choices[2].text
    assert expected.choices[2].text.startswith(third.text)
    with pytest.raises(InputError, match="there is no answer 3; the request has 3, counted from 0"):
        stream.cancel(3)


def test_equal_answers_are_generated_once(engine: Engine) -> None:
    before = engine.model.queue.yield_turn
    passes = 0

    def counted(ticket: Ticket) -> bool:
        nonlocal passes
        passes += 1
        return before(ticket)

    engine.model.queue.yield_turn = counted  # type: ignore[method-assign]
    alone = engine.generate("the other thing", max_tokens=20)
    needed, passes = passes, 0
    reply = engine.generate("the other thing", max_tokens=20, n=3, best_of=5)
    assert passes <= needed
    assert {choice.text for choice in reply.choices} == {alone.text}
    assert [choice.stats.completion_tokens for choice in reply.choices] == [alone.stats.completion_tokens] * 3


@pytest.mark.parametrize("options", [{"n": 4}, {"best_of": 4}])
def test_several_answers_have_one_cache(tiny_bundle: Path, options: dict[str, int]) -> None:
    kept = []
    for several in ({}, options):
        with edgerun.load(tiny_bundle, threads=1, cache=False) as engine:
            engine.generate("the other thing", max_tokens=60, temperature=1.0, seed=1, ignore_eos=True, **several)
            kept.append((len(engine.model.prefixes), engine.model.prefixes.nbytes))
    assert kept[0] == kept[1]
    assert kept[0][0] == 1


@pytest.mark.parametrize("count", [0, 129])
def test_an_impossible_number_of_answers_is_refused(engine: Engine, count: int) -> None:
    with pytest.raises(InputError, match=f"n is {count}; it must be between 1 and 128"):
        engine.generate("the", n=count)


def test_a_conversation_has_one_answer(engine: Engine) -> None:
    with pytest.raises(InputError, match="n is 2; a conversation goes on from one answer"):
        engine.session().send("the", n=2)
    with pytest.raises(InputError, match="best_of is 2; a conversation goes on from one answer"):
        engine.session().send("the", best_of=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": 0}, "parallel is 0; it must be 1 or more"),
        ({"max_waiting": -1}, "max_waiting is -1; it must be 0 or more"),
    ],
)
def test_impossible_queues_are_refused(tiny_bundle: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        edgerun.load(tiny_bundle, **options)
