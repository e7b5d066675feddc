"""Answers that follow a grammar have the target's distribution, renormalized over what the grammar allows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest

pytest.importorskip("llguidance", reason="needs the extra structured")

from edgerun.errors import EdgeError
from edgerun.runtime.decode import DecodeLimits, FinishReason, Step, decode
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from edgerun.runtime.sampling.token_mask import DeadEndError
from edgerun.runtime.scheduling.work_thread import WorkThread
from edgerun.runtime.speculation.choice import DraftSampling
from edgerun.runtime.speculation.drafters.draft_model import DraftModel
from edgerun.runtime.speculation.drafters.recycling import RecycledTable, RecyclingDrafter
from edgerun.runtime.speculation.drafters.sampled import ModelDistributions
from edgerun.runtime.speculation.drafters.suffix import SuffixDrafter
from edgerun.runtime.speculation.sampled_speculator import SampledSpeculator
from edgerun.runtime.speculation.speculator import Speculator
from edgerun.runtime.speculation.tree import Source
from edgerun.runtime.structure import grammar_state
from support.adversarial_drafters import NEARLY_FREE, FixedCost, adversaries, eager
from support.chi_square import expect_distribution
from support.emulated_graph import EmulatedGraph, Floats, Text
from support.nightly import some_nightly
from support.small_grammars import EOS, GRAMMARS, V, compiled, enumerated, started, text_of, toy_logits

PROMPT = (1, 2, 5)
LIMITS = DecodeLimits(12, frozenset({EOS}))
PARAMS = SamplingParams(temperature=1.0)
REGEXES = {
    "letters": r"(a|b){1,2}c?",
    "forced": "abc(a|b)cab",
    "words": "(ab|ca|b)(c|aa)?",
}


@pytest.fixture(scope="module")
def thread() -> Iterator[WorkThread]:
    thread = WorkThread("test")
    yield thread
    thread.close()


def steps_of(
    grammar: str,
    params: SamplingParams,
    speculator: Speculator | None = None,
    limits: DecodeLimits = LIMITS,
    thread: WorkThread | None = None,
) -> list[Step]:
    graph = EmulatedGraph(toy_logits, V, 64)
    state = started(grammar, thread)
    return list(decode(graph, PROMPT, Sampler(params, V, state), limits, speculator, constraint=state))


def answer_of(steps: list[Step]) -> Text:
    return tuple(token for step in steps for token in step.tokens)


def free_drafters() -> Speculator:
    return eager(SuffixDrafter(), RecyclingDrafter(RecycledTable(V)))


def sampled_drafter() -> Speculator:
    """Whose drafts are the forced tokens alone, since an answer has a grammar."""
    model = DraftModel(EmulatedGraph(toy_logits, V, 64), FixedCost({64: {1: 1e-6, 16: 1.1e-6}}), V)
    return SampledSpeculator(ModelDistributions(model), FixedCost(NEARLY_FREE), DraftSampling.TREE, trees=True)


LONG = 'start: "abccabbacc" /a|b/'
"""Forced tokens for several rounds, then a choice."""
WAYS: dict[str, Callable[[], Speculator] | None] = {
    "plain": None,
    "drafters": free_drafters,
    "sampled drafts": sampled_drafter,
}


def draws_of(grammar: str, way: str, draws: int, thread: WorkThread | None) -> Counter[Text]:
    make = WAYS[way]
    speculator = None if make is None else make()
    found: Counter[Text] = Counter()
    for seed in range(draws):
        params = SamplingParams(temperature=1.0, seed=seed)
        found[answer_of(steps_of(grammar, params, speculator, thread=thread))] += 1
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", GRAMMARS)
def test_sampled_answers_have_the_renormalized_distribution(name: str, way: str) -> None:
    check_draws(name, way, 300, None)


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "draws", "threaded"),
    [("words", 10_000, False), ("letters", 2_000, False), ("forced", 2_000, False), ("words", 300, True)],
)
def test_many_draws_have_the_renormalized_distribution(
    name: str, draws: int, way: str, threaded: bool, thread: WorkThread
) -> None:
    """100,000 draws pass as well, and take minutes for each way (docs/log.md); a draw waits for a thread's masks."""
    check_draws(name, way, draws, thread if threaded else None)


def check_draws(name: str, way: str, draws: int, thread: WorkThread | None) -> None:
    """Compare as many answers with the distribution that enumeration gives."""
    expected = enumerated(GRAMMARS[name], toy_logits, PROMPT, PARAMS, 12)
    assert sum(expected.values()) == pytest.approx(1)
    assert all(re.fullmatch(REGEXES[name], text_of(answer)) for answer in expected)
    expect_distribution(draws_of(GRAMMARS[name], way, draws, thread), expected, draws)


@pytest.mark.parametrize("params", [SamplingParams(), *(SamplingParams(1.0, seed=seed) for seed in range(6))])
@pytest.mark.parametrize("adversary", some_nightly(sorted(adversaries([1], V, EOS)), every=4))
def test_the_text_of_a_seed_does_not_depend_on_drafts(
    adversary: str, params: SamplingParams, thread: WorkThread
) -> None:
    for name, grammar in GRAMMARS.items():
        plain = answer_of(steps_of(grammar, params))
        for trees in (True, False):
            drafter = adversaries([*PROMPT, *plain, EOS], V, EOS)[adversary]
            steps = steps_of(grammar, params, eager(drafter, trees=trees), thread=thread)
            assert answer_of(steps) == plain
            assert re.fullmatch(REGEXES[name], text_of(plain))
            assert steps[-1].finish is FinishReason.STOP
            for step in steps:
                assert step.round is None or step.round.emitted == step.produced == sum(step.round.accepted) + 1


def test_forced_tokens_are_all_accepted_and_named() -> None:
    speculator = eager(SuffixDrafter())
    steps = steps_of(LONG, SamplingParams(), speculator)
    drafted = sum(step.round.drafted[Source.GRAMMAR] for step in steps if step.round is not None)
    accepted = sum(step.round.accepted[Source.GRAMMAR] for step in steps if step.round is not None)
    assert drafted == accepted > 5
    plain = steps_of(LONG, SamplingParams())
    assert sum(step.target_passes for step in steps) < sum(step.target_passes for step in plain)


def test_forced_tokens_are_drafted_while_drafting_is_disabled() -> None:
    speculator = eager(SuffixDrafter())
    for _ in range(3):
        speculator.balance.backoff.start()
    assert speculator.disabled
    steps = steps_of(LONG, SamplingParams(), speculator)
    assert answer_of(steps) == answer_of(steps_of(LONG, SamplingParams()))
    accepted = sum(step.round.accepted[Source.GRAMMAR] for step in steps if step.round is not None)
    assert accepted > 5


def test_a_complete_answer_stops_without_a_pass_for_its_end() -> None:
    """The end itself is not counted, and an answer that is complete at its largest length is not cut."""
    grammar = 'start: "cab"'
    steps = steps_of(grammar, SamplingParams())
    answer = answer_of(steps)
    assert text_of(answer) == "cab"
    assert steps[-1].closed
    assert sum(step.target_passes for step in steps) == len(answer) == sum(step.produced for step in steps)
    exact = steps_of(grammar, SamplingParams(), limits=DecodeLimits(len(answer), frozenset({EOS})))
    assert exact[-1].finish is FinishReason.STOP
    cut = steps_of(grammar, SamplingParams(), limits=DecodeLimits(len(answer) - 1, frozenset({EOS})))
    assert cut[-1].finish is FinishReason.LENGTH


def test_a_text_that_no_token_can_write_is_an_error() -> None:
    with pytest.raises(EdgeError, match="cannot write"):
        steps_of('start: "a" "xyz"', SamplingParams())


@pytest.mark.parametrize("seed", some_nightly(range(60), every=10))
def test_masks_do_not_depend_on_the_paths_asked_about_before(seed: int) -> None:
    random = np.random.default_rng(seed)
    for grammar in GRAMMARS.values():
        state, paths = started(grammar), [()]
        for _ in range(30):
            path = paths[random.integers(len(paths))]
            mask, fresh = state.mask(path), started(grammar).mask(path)
            assert [mask.allows(token) for token in range(V)] == [fresh.allows(token) for token in range(V)]
            assert list(state.forced(path)) == list(started(grammar).forced(path))
            paths += [(*path, token) for token in range(1, V) if mask.allows(token)]


@pytest.mark.parametrize("seed", some_nightly(range(40), every=10))
def test_tokens_of_a_long_forced_text_are_those_of_its_masks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered of a forced text equals what would be computed, also after other tokens of the same text."""
    monkeypatch.setattr(grammar_state, "_SLOW_MASK_S", -1.0)  # every text is long
    random = np.random.default_rng(seed)
    for grammar in (*GRAMMARS.values(), LONG, 'start: "abcab" /a|b/ "cacacaabab" /b|c/ "abab"'):
        ours = grammar_state.GrammarMatcher(compiled(grammar).deep_copy, "grammar")
        plain, size = compiled(grammar).deep_copy(), 0
        for _ in range(60):
            if size and random.random() < 0.3:
                count = int(random.integers(1, size + 1))
                ours.rollback(count)
                assert plain.rollback(count)
                size -= count
            if not plain.is_stopped():
                bits = ours.bits()
                assert bits.tobytes() == plain.compute_bitmask()
                assert list(ours.forced()) == plain.compute_ff_tokens()
            token = int(random.integers(1, V))
            consumed = plain.try_consume_tokens([token])
            assert ours.consume(token) == bool(consumed)
            size += consumed


def test_a_draft_that_leads_into_a_dead_end_does_no_harm() -> None:
    """Beyond the first token of one branch, no token of the model can go on."""
    grammar = 'start: "a" "xyz" | "b" "c" /[ab]{2}/'

    def after(text: Text) -> Floats:
        logits = toy_logits(text).copy()
        logits[2] += 20.0 * (text == PROMPT)
        return logits

    def answer(speculator: Speculator | None) -> Text:
        state = started(grammar)
        graph = EmulatedGraph(after, V, 64)
        return answer_of(list(decode(graph, PROMPT, Sampler(PARAMS, V, state), LIMITS, speculator, constraint=state)))

    state = started(grammar)
    with pytest.raises(DeadEndError):
        state.mask((1,))
    known = state.mask((2,))
    assert known.allows(3)
    assert answer(free_drafters()) == answer(None)


def test_without_a_thread_masks_are_computed_at_once() -> None:
    def no_thread(work: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    state = started(GRAMMARS["words"])
    state._submit = no_thread  # type: ignore[misc]
    graph = EmulatedGraph(toy_logits, V, 64)
    steps = list(decode(graph, PROMPT, Sampler(PARAMS, V, state), LIMITS, constraint=state))
    assert answer_of(steps) == answer_of(steps_of(GRAMMARS["words"], PARAMS))
