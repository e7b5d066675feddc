"""Speculative decoding on real sessions: output, cache and statistics are right whatever is drafted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgerun.runtime.decode import DecodeLimits, FinishReason, Step, decode
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.bound_session import BoundSession
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams, uniform_at
from edgerun.runtime.speculation.drafters.edit import EditDrafter
from edgerun.runtime.speculation.drafters.recycling import RecycledTable, RecyclingDrafter
from edgerun.runtime.speculation.drafters.suffix import SuffixDrafter
from edgerun.runtime.speculation.speculator import Speculator
from edgerun.runtime.speculation.verification import NearTies
from support.adversarial_drafters import Adversary, adversaries, check_rounds, eager
from support.nightly import some_nightly

VOCABULARY = 300
CONTEXT = 256
EOS = 0
GREEDY = SamplingParams()
SAMPLED = [SamplingParams(0.8, top_k=40, top_p=0.95, repeat_penalty=1.1, seed=seed) for seed in (1, 2, 3)]
MODELS = [
    ("llama", "fp32"),
    ("qwen3", "int8"),
    ("qwen2", "int4"),
    ("llama", "int8"),
    ("llama", "int4"),
    ("qwen3", "fp32"),
]
EVERYDAY, NIGHTLY = MODELS[:3], [pytest.param(model, marks=pytest.mark.nightly) for model in MODELS[3:]]
"""Families and weight formats; the everyday ones have each family and each format once."""
ADVERSARIES = sorted(adversaries([1], VOCABULARY, EOS))
DRAFTERS: dict[str, Callable[[], Speculator]] = {
    "suffix": lambda: eager(SuffixDrafter()),
    "recycle": lambda: eager(RecyclingDrafter(RecycledTable(VOCABULARY))),
    "all": lambda: eager(EditDrafter(), SuffixDrafter(), RecyclingDrafter(RecycledTable(VOCABULARY))),
    "chains": lambda: eager(EditDrafter(), SuffixDrafter(), RecyclingDrafter(RecycledTable(VOCABULARY)), trees=False),
}


@pytest.fixture(scope="module")
def graph_of(tiny_bundle_of: Callable[[str, str], Path]) -> Callable[[str, str], GraphSession]:
    graphs: dict[Path, GraphSession] = {}

    def graph(family: str, weights: str) -> GraphSession:
        bundle = tiny_bundle_of(family, weights)
        if bundle not in graphs:
            graphs[bundle] = GraphSession(bundle / "model.onnx", SessionConfig(choose_device("cpu"), 1))
        return graphs[bundle]

    return graph


@pytest.fixture(scope="module")
def graph(graph_of: Callable[[str, str], GraphSession]) -> GraphSession:
    return graph_of("llama", "fp32")


def bind(graph: GraphSession, limit: int = CONTEXT) -> BoundSession:
    return graph.bind(graph.arena(limit))


def prompt_of(seed: int) -> list[int]:
    """Some tokens, some of them again."""
    random = np.random.default_rng(seed)
    tokens = random.integers(5, VOCABULARY, int(random.integers(1, 14))).tolist()
    return [*tokens, *tokens[: int(random.integers(0, 8))]]


def steps_of(
    bound: BoundSession,
    prompt: list[int],
    params: SamplingParams,
    limits: DecodeLimits,
    speculator: Speculator | None = None,
    epsilon: float | None = None,
) -> list[Step]:
    """Decode an answer; with an `epsilon`, near ties are recomputed."""
    sampler = Sampler(params, VOCABULARY)
    near_ties = None if epsilon is None else NearTies(bound, sampler, epsilon, lambda: False)
    steps = list(decode(bound, prompt, sampler, limits, speculator, near_ties))
    assert all(step.finish is None for step in steps[:-1])
    assert steps[-1].finish is not None
    check_rounds(steps)
    return steps


def tokens_of(steps: Iterable[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


def plain(graph: GraphSession, prompt: list[int], params: SamplingParams, limits: DecodeLimits) -> list[int]:
    return tokens_of(steps_of(bind(graph), prompt, params, limits))


def named_speculator(name: str, text: list[int]) -> Speculator:
    """A speculator by name; `text` is the expected output, prompt included."""
    return DRAFTERS[name]() if name in DRAFTERS else eager(adversaries(text, VOCABULARY, EOS)[name])


@pytest.mark.parametrize("model", [*EVERYDAY, *NIGHTLY], ids="-".join)
@pytest.mark.parametrize("seeds", some_nightly([range(9), range(9, 18)], 2), ids=str)
def test_the_output_is_that_of_plain_decoding(model, seeds: range, graph_of) -> None:
    graph, limits = graph_of(*model), DecodeLimits(24, frozenset({EOS}))
    speculators = {name: make() for name, make in DRAFTERS.items()}
    saved, differing = dict.fromkeys(speculators, 0), 0
    for seed in seeds:
        prompt = prompt_of(seed)
        for params in (GREEDY, SAMPLED[seed % 3]):
            expected = plain(graph, prompt, params, limits)
            for name, speculator in speculators.items():
                steps = steps_of(bind(graph), prompt, params, limits, speculator)
                saved[name] += sum(step.produced for step in steps) - len(steps)
                text = tokens_of(steps)
                if text != expected:
                    # With quantized models, wide passes differ slightly from narrow ones.
                    assert model[1] != "fp32"
                    differing += 1
                    assert_in_doubt(graph, prompt, expected, text, params)
    assert differing <= 8  # of 72
    # They do draft, and some draft tokens are accepted.
    assert all(tokens > 10 for tokens in saved.values()), saved


def assert_in_doubt(
    graph: GraphSession, prompt: list[int], expected: list[int], text: list[int], params: SamplingParams
) -> None:
    """Where two outputs differ first, the choice was a near tie."""
    pairs = zip([*expected, EOS], [*text, EOS], strict=False)
    same, (_, other) = next((index, pair) for index, pair in enumerate(pairs) if pair[0] != pair[1])
    before = [*prompt, *expected[:same]]
    sampler = Sampler(params, VOCABULARY)
    sampler.observe(before)
    logits = bind(graph).forward(before, logits_for=(len(before) - 1,))[0]
    if params.greedy:
        assert logits.max() - logits[other] < 0.4
        return
    ids, probabilities = sampler.probabilities(logits)
    assert other in ids
    end = float(np.cumsum(probabilities)[ids == other][0])
    drawn = uniform_at(params.seed, len(before))
    assert end - float(probabilities[ids == other][0]) - 0.15 < drawn < end + 0.15


@pytest.mark.parametrize("epsilon", [None, 0.5, 1e9], ids=["", "some recomputed", "all recomputed"])
def test_the_targets_choices_are_recycled(graph: GraphSession, epsilon: float | None) -> None:
    """Also where passes were run again in between."""
    prompt, limits = prompt_of(7), DecodeLimits(40)
    text = [*prompt, *plain(graph, prompt, GREEDY, limits)]
    recycle, bound, sampler = RecyclingDrafter(RecycledTable(VOCABULARY)), bind(graph), Sampler(GREEDY, VOCABULARY)
    oracle = eager(adversaries(text, VOCABULARY, EOS)["nearly right"])
    speculator = eager(*oracle.drafters, recycle)
    near_ties = None if epsilon is None else NearTies(bound, sampler, epsilon, lambda: False)
    done, chosen = list(prompt), dict[int, int]()
    for step in decode(bound, prompt, sampler, limits, speculator, near_ties):
        for token in step.tokens:
            if step.round is not None and any(step.round.candidates):
                chosen[done[-1]] = token
            done.append(token)
        assert {token: recycle.table.candidates(token)[0].token for token in chosen} == chosen
    assert done == text
    assert chosen


@pytest.mark.parametrize("name", some_nightly(ADVERSARIES, every=2))
@pytest.mark.parametrize("trees", [True, False], ids=["trees", "chains"])
def test_no_drafter_changes_the_output(graph: GraphSession, name: str, trees: bool) -> None:
    for seed, params in enumerate((GREEDY, GREEDY, *SAMPLED)):
        prompt = prompt_of(100 + seed)
        free = plain(graph, prompt, params, DecodeLimits(30))
        for eos in (frozenset({EOS}), frozenset(free[11:12])):
            expected = plain(graph, prompt, params, DecodeLimits(30, eos))
            drafter = adversaries([*prompt, *free], VOCABULARY, min(eos), seed)[name]
            steps = steps_of(bind(graph), prompt, params, DecodeLimits(30, eos), eager(drafter, trees=trees))
            assert tokens_of(steps) == expected
            assert drafter.proposals > 0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED[0]], ids=["greedy", "sampled"])
def test_an_oracle_fills_every_pass(graph: GraphSession, params: SamplingParams) -> None:
    prompt = prompt_of(3)
    text = [*prompt, *plain(graph, prompt, params, DecodeLimits(40))]
    drafter = Adversary(lambda done, _: adversaries(text, VOCABULARY, EOS)["oracle"].make(done, 5))
    steps = steps_of(bind(graph), prompt, params, DecodeLimits(40), eager(drafter))
    assert tokens_of(steps) == text[len(prompt) :]
    # After the first token: 39 tokens in passes of six.
    assert [step.produced for step in steps] == [1, *[6] * 6, 3]


@pytest.mark.parametrize("name", ["all", "nearly right", "wide", "scattered", "right, then wrong"])
@pytest.mark.parametrize("model", [("llama", "fp32"), ("qwen3", "fp32")], ids="-".join)
def test_after_every_round_the_cache_is_that_of_the_sequence(model, graph_of, name: str) -> None:
    graph = graph_of(*model)
    for seed, params in enumerate((GREEDY, SAMPLED[1])):
        prompt, limits = prompt_of(200 + seed), DecodeLimits(30)
        text = [*prompt, *plain(graph, prompt, params, limits)]
        whole = bind(graph)
        whole.forward(text, logits_for=(0,))
        whole.arena.commit(len(text))
        (rows,) = whole.arena.snapshot()
        speculator = named_speculator(name, text)
        bound, length = bind(graph), len(prompt) - 1
        for step in decode(bound, prompt, Sampler(params, VOCABULARY), limits, speculator):
            length += len(step.tokens)
            # The last token, which is the next round's anchor, has no slot yet.
            assert bound.arena.length == length
            np.testing.assert_allclose(bound.arena.snapshot()[0], rows[..., :length, :], atol=1e-4)


@pytest.mark.parametrize("name", ["all", "oracle", "wide", "huge", "nearly right", "deep", "confident and wrong"])
@pytest.mark.parametrize("most", [1, 2, 3, 4, 9, 20])
@pytest.mark.parametrize("by_context", [False, True], ids=["max_tokens", "context"])
def test_a_limit_ends_an_answer_as_in_plain_decoding(
    graph: GraphSession, name: str, most: int, by_context: bool
) -> None:
    for params in (GREEDY, SAMPLED[2]):
        prompt = prompt_of(300)
        free = plain(graph, prompt, params, DecodeLimits(40))
        bound = bind(graph, len(prompt) + most if by_context else CONTEXT)
        limits = DecodeLimits() if by_context else DecodeLimits(most)
        steps = steps_of(bound, prompt, params, limits, named_speculator(name, [*prompt, *free]))
        assert tokens_of(steps) == free[:most]
        assert steps[-1].finish is FinishReason.LENGTH
        assert bound.arena.length == len(prompt) + most - 1


def test_an_end_token_within_an_accepted_path_ends_the_answer(graph: GraphSession) -> None:
    prompt = prompt_of(5)
    free = plain(graph, prompt, GREEDY, DecodeLimits(30))
    text = [*prompt, *free]
    for place in range(30):
        end = free[place]
        first = free.index(end)
        bound = bind(graph)
        speculator = eager(adversaries(text, VOCABULARY, end)["oracle"])
        steps = steps_of(bound, prompt, GREEDY, DecodeLimits(30, frozenset({end})), speculator)
        assert tokens_of(steps) == free[:first]
        assert steps[-1].finish is FinishReason.STOP
        assert sum(step.produced for step in steps) == first + 1
        assert bound.arena.length <= len(prompt) + first


@pytest.mark.parametrize("name", ["all", "nearly right"])
@pytest.mark.parametrize(
    "epsilon", some_nightly([None, 0.5, 1e9], every=2), ids=["", "some recomputed", "all recomputed"]
)
def test_an_answer_closed_before_any_pass_can_be_continued(graph: GraphSession, name: str, epsilon) -> None:
    prompt, limits = prompt_of(6), DecodeLimits(25)
    expected = plain(graph, prompt, GREEDY, limits)
    text = [*prompt, *expected]
    for after in range(8) if epsilon is None else range(0, 40, 3):
        speculator, bound, asked = named_speculator(name, text), bind(graph), []

        def cancelled(asked: list[None] = asked, after: int = after) -> bool:
            asked.append(None)
            return len(asked) > after

        sampler = Sampler(GREEDY, VOCABULARY)
        near_ties = None if epsilon is None else NearTies(bound, sampler, epsilon, cancelled)
        steps = list(decode(bound, prompt, sampler, replace(limits, cancelled=cancelled), speculator, near_ties))
        done = tokens_of(steps)
        ended = len(asked) <= after
        assert steps[-1].finish is (FinishReason.LENGTH if ended else FinishReason.CANCELLED)
        assert ended or steps[-1].target_passes == 0
        assert done == expected[: len(done)]
        # The cache holds no slots of tokens that were not emitted.
        assert bound.arena.length <= len(prompt) + len(done)
        # The same sequence again, and another with a common prefix, over the cached slots.
        assert tokens_of(steps_of(bound, prompt, GREEDY, limits, speculator)) == expected
        other = [*text[: len(prompt) + 5], 77]
        assert tokens_of(steps_of(bound, other, GREEDY, limits, speculator)) == plain(graph, other, GREEDY, limits)
