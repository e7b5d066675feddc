"""A draft model that runs while the target verifies: nothing lost or doubled, and what fails in its thread surfaces."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgerun
from edgerun import EdgeError, Engine, GenerateOptions
from edgerun.runtime.decode import DecodeLimits, Step, decode
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from edgerun.runtime.scheduling.work_thread import WorkThread
from edgerun.runtime.speculation import draft_ahead
from edgerun.runtime.speculation.choice import Speculation
from edgerun.runtime.speculation.draft_ahead import NOTHING_AHEAD, DraftAhead
from edgerun.runtime.speculation.drafters.draft_model import DraftModel
from edgerun.runtime.speculation.drafters.recycling import RecycledTable, RecyclingDrafter
from edgerun.runtime.speculation.drafters.suffix import SuffixDrafter
from edgerun.runtime.speculation.growth import TreeGrowth
from edgerun.runtime.speculation.speculator import Speculator
from edgerun.runtime.speculation.tree import Tree
from support.adversarial_drafters import FixedCost, check_rounds
from support.emulated_graph import EmulatedGraph, Floats, LogitsAfter, Text
from support.tiny_models import write_bundle

V, EOS, CONTEXT = 20, 0, 256
GREEDY = SamplingParams()
MODEL = Speculation.parse("model")
TARGET_COST = {128: {1: 1.0, 2: 1.1, 16: 3.0}}
DRAFT_COST = {128: {1: 0.01, 2: 0.012, 128: 0.1}}
"""Seconds of a pass by width. They decide what is drafted; no pass takes that long."""


@pytest.fixture(autouse=True)
def short_steps_run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of a few thousand weights take too short a step to be run ahead otherwise."""
    monkeypatch.setattr(draft_ahead, "_LEAST_SHARE", 0)


def toy_logits(text: Text) -> Floats:
    """Logits that depend on every token of the text."""
    number = hash(text) & 0xFFFFFF
    return (12 * np.sin(np.arange(1, V + 1) * (1 + number % 1009) * 0.37 + number)).astype(np.float32)


def preferring(choose: Callable[[Text], int]) -> LogitsAfter:
    """A model that is certain of one token."""

    def logits_after(text: Text) -> Floats:
        logits = np.zeros(V, np.float32)
        logits[choose(text)] = 9
        return logits

    return logits_after


def random_token(text: Text) -> int:
    return hash((*text, 7)) % V


DRAFTS: dict[str, LogitsAfter] = {
    "oracle": toy_logits,
    "random": lambda text: toy_logits((3, *text)),
    "always wrong": preferring(lambda text: (int(toy_logits(text).argmax()) + 1) % V),
    "end of text": preferring(lambda text: EOS),
    "often right": lambda text: toy_logits(text if random_token(text) % 5 else (3, *text)),
    "certain": preferring(lambda text: int(toy_logits(text).argmax()) if random_token(text) % 7 else 1),
}
"""Draft models by what they are to the target."""


class PacedAhead(DraftAhead):
    """Runs a number of passes ahead that a function draws from the paths that were run, however long they take."""

    def __init__(self, model: DraftModel, thread: WorkThread, budget: Callable[[], int]) -> None:
        super().__init__(model, thread)
        self._budget = budget
        self._left = 0

    def start(self, *args: Any) -> None:
        self._left = self._budget()
        super().start(*args)

    def _is_worth(self, chance: float, seconds: float) -> bool:
        self._left -= 1
        return self._left >= 0

    def wait(self) -> None:
        """Wait until the budget is used up: the target's pass takes that long."""
        with self._idle:
            pass


class Pair:
    """An emulated target and draft model, with the draft model run ahead while the target runs."""

    def __init__(self, draft: LogitsAfter, budget: Callable[[], int] | None) -> None:
        self.thread = WorkThread("edge-run draft")
        self.draft = EmulatedGraph(draft, V, CONTEXT)
        self.model = DraftModel(self.draft, FixedCost(DRAFT_COST), V)
        self.ahead = (
            DraftAhead(self.model, self.thread) if budget is None else PacedAhead(self.model, self.thread, budget)
        )
        self.speculator = Speculator(
            [SuffixDrafter(), RecyclingDrafter(RecycledTable(V))],
            FixedCost(TARGET_COST),
            model=self.model,
            ahead=self.ahead,
        )

    def target(self) -> EmulatedGraph:
        graph = EmulatedGraph(toy_logits, V, CONTEXT)
        forward = graph.forward

        def waiting(*args, **options) -> Floats:
            logits = forward(*args, **options)
            if isinstance(self.ahead, PacedAhead):
                self.ahead.wait()
            return logits

        graph.forward = waiting  # type: ignore[method-assign]
        return graph

    def steps(self, prompt: list[int], params: SamplingParams, limits: DecodeLimits) -> list[Step]:
        steps = list(decode(self.target(), prompt, Sampler(params, V), limits, self.speculator))
        self.ahead.end()
        check_rounds(steps)
        return steps


def plain(prompt: list[int], params: SamplingParams, limits: DecodeLimits) -> list[int]:
    steps = decode(EmulatedGraph(toy_logits, V, CONTEXT), prompt, Sampler(params, V), limits)
    return [token for step in steps for token in step.tokens]


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("rounds", [120, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_no_token_is_lost_or_doubled(name: str, rounds: int) -> None:
    """Decode until a draft model has drafted in so many rounds, greedily and sampled, at random paces."""
    random = np.random.default_rng(3)
    pair = Pair(DRAFTS[name], lambda: int(random.integers(0, 12)))
    done = passes = kept = drafted = accepted = answers = 0
    while done < rounds:
        prompt = random.integers(1, V, int(random.integers(1, 30))).tolist()
        limits = DecodeLimits(int(random.integers(2, 80)), frozenset({EOS}))
        params = GREEDY if answers % 2 else SamplingParams(0.9, top_k=12, repeat_penalty=1.2, seed=answers)
        steps = pair.steps(prompt, params, limits)
        # The text is that of plain decoding: no token is lost or doubled.
        assert [token for step in steps for token in step.tokens] == plain(prompt, params, limits)
        seen = [step.round for step in steps if step.round is not None]
        assert sum(step.produced for step in steps) == 1 + sum(
            1 if step.round is None else 1 + sum(step.round.accepted) for step in steps[1:]
        )
        done += len(seen)
        passes += sum(one.ahead.passes for one in seen)
        kept += sum(one.ahead.kept for one in seen)
        drafted += sum(map(sum, (one.drafted for one in seen)))
        accepted += sum(map(sum, (one.accepted for one in seen)))
        answers += 1
    pair.thread.close()
    # Every pass of the model ran in one of the two threads, and those ahead were settled.
    assert pair.ahead.total.passes <= pair.model.passes == pair.draft.passes
    assert passes <= pair.ahead.total.passes
    assert kept <= pair.ahead.total.kept <= passes
    assert accepted <= drafted
    assert passes > 0
    if name == "oracle":
        assert kept > 0.1 * passes
    if name == "always wrong":
        assert kept < 0.1 * passes


@pytest.mark.parametrize("name", ["oracle", "often right"])
def test_threads_that_race_change_nothing(name: str) -> None:
    """Without a pace: passes end whenever they end, before the target's or after it."""
    random = np.random.default_rng(4)
    pair = Pair(DRAFTS[name], None)
    pair.draft._seconds = lambda _: float(random.choice([0, 0.0002, 0.0006]))
    graph = pair.target()
    graph._seconds = lambda _: 0.0005
    for seed in range(4):
        limits, prompt = DecodeLimits(60), [3, 5, 3, 5 + seed]
        steps = list(decode(graph, prompt, Sampler(GREEDY, V), limits, pair.speculator))
        check_rounds(steps)
        assert [token for step in steps for token in step.tokens] == plain(prompt, GREEDY, limits)
        graph.arena.rewind_to(0)
    pair.ahead.end()
    pair.thread.close()


@pytest.mark.parametrize(("share", "runs_ahead"), [(0.011, False), (0.003, True)])
def test_a_model_whose_step_is_much_shorter_takes_turns(
    share: float, runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_ahead, "_LEAST_SHARE", share)
    pair = Pair(toy_logits, lambda: 3)
    # The draft's step takes at most a hundredth of the target's pass, and for a draft of 16 tokens a third of that.
    steps = pair.steps([4, 5, 6], GREEDY, DecodeLimits(40))
    pair.thread.close()
    assert any(step.round is not None and step.round.width > 1 for step in steps)
    assert (pair.ahead.total.passes > 0) == runs_ahead


def test_what_was_run_ahead_is_not_run_again() -> None:
    """With a perfect draft model, only the first draft is waited for."""
    pair = Pair(preferring(lambda text: int(toy_logits(text).argmax())), lambda: 20)
    steps = pair.steps([4, 5, 6], GREEDY, DecodeLimits(100))
    pair.thread.close()
    rounds = [step.round for step in steps[1:]]
    assert all(one is not None for one in rounds)
    drafting = [one for one in rounds if one is not None and one.width > 1]
    assert sum(one.emitted for one in drafting) > 60
    ran = sum(one.ahead.passes for one in rounds if one is not None)
    assert sum(one.ahead.kept for one in rounds if one is not None) > 0.3 * ran > 20
    # The others are the passes that the answering thread waited for.
    assert pair.model.passes - pair.ahead.total.passes < 20


def test_a_long_prompt_is_read_ahead_in_parts() -> None:
    pair = Pair(DRAFTS["oracle"], lambda: 4)
    pair.ahead._affordable = lambda missing: min(missing, 20)  # type: ignore[method-assign]
    prompt = np.random.default_rng(2).integers(1, V, 90).tolist()
    speculator = pair.speculator
    # The draft model is not run by the answering thread, which would read the whole prompt.
    speculator.mixer.model_value.pays = lambda *args, **options: False  # type: ignore[method-assign]
    speculator.mixer.model_value.gain = 1.0
    pair.steps(prompt, GREEDY, DecodeLimits(4))
    pair.thread.close()
    assert pair.model._arena.length >= len(prompt)
    assert pair.draft.passes >= 90 // 20


@pytest.mark.parametrize("error", [EdgeError("the device is gone", "plug it in"), ValueError("a bug")])
def test_errors_in_the_thread_surface_where_the_answer_is_read(error: Exception) -> None:
    answering = threading.get_ident()

    def failing(text: Text) -> Floats:
        if threading.get_ident() != answering:
            raise error
        return toy_logits(text)

    pair = Pair(failing, lambda: 5)
    with pytest.raises(type(error), match=str(error.args[0] if isinstance(error, ValueError) else "the device")):
        pair.steps([3, 4, 5], GREEDY, DecodeLimits(50))
    # Another answer works, with the same model.
    pair.draft._logits_after = toy_logits
    assert [token for step in pair.steps([3, 4], GREEDY, DecodeLimits(20)) for token in step.tokens] == plain(
        [3, 4], GREEDY, DecodeLimits(20)
    )
    pair.thread.close()


def test_an_answer_that_has_ended_is_not_spoilt_by_its_drafts(caplog: pytest.LogCaptureFixture) -> None:
    def failing(text: Text) -> Floats:
        raise EdgeError("the device is gone", "plug it in")

    pair = Pair(failing, lambda: 3)
    pair.model.reset([3, 4, 5])
    pair.ahead.start(Tree.anchor_only(5), TreeGrowth((), None, pair.speculator.mixer), 3, 1.0, 9)
    pair.ahead.wait()
    pair.ahead.end()
    assert "the draft model failed after the last token: the device is gone" in caplog.text
    assert pair.ahead.settle([3, 4, 5, 6]) == NOTHING_AHEAD
    pair.thread.close()


@pytest.fixture(scope="module", params=["llama", "qwen3_5_text"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A pair on one CPU whose draft model runs ahead all the same."""
    target, draft = (write_bundle(tmp_path_factory.mktemp("pair"), request.param, seed=seed) for seed in (1, 1))
    with edgerun.load(target, draft=draft, threads=1, cache=False, parallel=2) as engine:
        run_ahead(engine)
        yield engine
    assert not any(thread.name == "edge-run draft" for thread in threading.enumerate())


class FirstThread(WorkThread):
    """A thread that has run ahead all that is worth it before the target's pass begins.

    The target of a test is so small that its pass may end before a busy machine has begun the work of another thread.
    """

    def submit(self, work: Callable[[], None]) -> None:
        done = threading.Event()

        def work_and_tell() -> None:
            work()
            done.set()

        super().submit(work_and_tell)
        done.wait()


def run_ahead(engine: Engine) -> None:
    """Let the draft model run ahead although it is on the target's device."""
    drafters = engine.model.drafters
    drafters._draft_thread = FirstThread("edge-run draft")
    drafters._pass_cost = FixedCost(TARGET_COST)


@pytest.mark.parametrize(
    "options", [GenerateOptions(), GenerateOptions(temperature=0.8, top_k=20, seed=3)], ids=["greedy", "sampled"]
)
def test_answers_of_an_engine_are_those_of_plain_decoding(engine: Engine, options: GenerateOptions) -> None:
    options = options.changed({"max_tokens": 60, "raw": True, "ignore_eos": True})
    for prompt in ("the other thing", "and to and of"):
        plain = engine.generate(prompt, options, speculation=Speculation.OFF)
        reply = engine.generate(prompt, options, speculation=MODEL, explain=True)
        assert reply.text == plain.text
        stats = reply.stats
        assert stats.completion_tokens == 1 + stats.accepted + stats.decode_passes
        assert 0 <= stats.accepted <= stats.drafted
        assert 0 < stats.passes_kept <= stats.passes_ahead
        assert stats.hidden_s > 0
        assert stats.target_s + stats.host_s + stats.draft_s <= stats.total_s
        assert sum(one.ahead.passes for one in stats.rounds if one is not None) == stats.passes_ahead
        assert (plain.stats.passes_ahead, plain.stats.hidden_s) == (0, 0)
        assert (plain.stats + stats).passes_kept == stats.passes_kept


def test_alternating_answers_have_a_draft_of_their_own_each(engine: Engine) -> None:
    options = GenerateOptions(max_tokens=50, raw=True, ignore_eos=True)
    prompts = ("in the other", "and the other of")
    expected = [engine.generate(prompt, options, speculation=Speculation.OFF).text for prompt in prompts]
    replies = [""] * len(prompts)

    def answer(index: int) -> None:
        replies[index] = engine.generate(prompts[index], options, speculation=MODEL).text

    for _ in range(3):
        threads = [threading.Thread(target=answer, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert replies == expected


def test_an_answer_may_be_left_at_any_chunk(engine: Engine) -> None:
    options = GenerateOptions(max_tokens=40, raw=True, ignore_eos=True)
    expected = engine.generate("in the", options, speculation=Speculation.OFF).text
    for chunks in range(1, 6):
        stream = engine.stream("in the", options, speculation=MODEL)
        heard = "".join(next(stream).text for _ in range(chunks))
        if chunks % 2:
            stream.cancel()
            heard += "".join(chunk.text for chunk in stream)
        stream.close()
        assert expected.startswith(heard)
        # The draft model belongs to nobody.
        assert all(not each.ahead._started for each in engine.model.drafters._idle if each.ahead is not None)
        assert engine.generate("in the", options, speculation=MODEL).text == expected


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "dropped"])
def test_the_thread_ends_with_the_engine(tiny_bundle: Path, closed: bool) -> None:
    before = set(threading.enumerate())
    engine = edgerun.load(tiny_bundle, draft=tiny_bundle, threads=1, cache=False)
    run_ahead(engine)
    stream = engine.stream("in the", max_tokens=40, raw=True, speculation=MODEL)
    next(stream)
    next(stream)
    started = [thread for thread in threading.enumerate() if thread.name == "edge-run draft" and thread not in before]
    assert len(started) == 1
    if closed:
        engine.close()
        assert not started[0].is_alive()
    del engine, stream
    gc.collect()
    started[0].join(30)
    assert not started[0].is_alive()
