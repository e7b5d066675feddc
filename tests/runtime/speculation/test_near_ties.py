"""Exact greedy output equals plain decoding where wide passes would choose other tokens, whatever is drafted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

import edgerun
from edgerun.export import ExportRecipe, WeightFormat, export_checkpoint
from edgerun.runtime.decode import DecodeLimits, FinishReason, Step, decode
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.bound_session import BoundSession
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.measure.exactness import measure_width_noise
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from edgerun.runtime.speculation.choice import Speculation
from edgerun.runtime.speculation.drafters.recycling import RecycledTable, RecyclingDrafter
from edgerun.runtime.speculation.drafters.suffix import SuffixDrafter
from edgerun.runtime.speculation.speculator import Speculator
from edgerun.runtime.speculation.verification import NearTies
from support.adversarial_drafters import adversaries, eager, speculator_of
from support.nightly import some_nightly
from support.tiny_models import tiny_config, tiny_weights, write_bundle, write_checkpoint, write_weights

VOCABULARY = 300
LIMITS = DecodeLimits(40)
GREEDY = SamplingParams()
PENALIZED = SamplingParams(repeat_penalty=1.3)
FP32, INT8, INT4 = FORMATS = [WeightFormat(32, 0), WeightFormat(8, 32), WeightFormat(4, 32)]
EVERYTHING = 1e9
"""An epsilon below which every margin lies."""


def bind(bundle: Path) -> BoundSession:
    session = GraphSession(bundle / "model.onnx", SessionConfig(choose_device("cpu"), 1))
    return session.bind(session.arena(256))


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Callable[[WeightFormat], BoundSession]:
    """Models in which every token has a twin whose embedding, and so whose logit, differs in the last bits only."""
    source = write_checkpoint(tmp_path_factory.mktemp("twins") / "checkpoint")
    weights = tiny_weights(tiny_config())
    embedding = weights["model.embed_tokens.weight"]
    half = len(embedding) // 2
    noise = np.random.default_rng(0).uniform(-3e-7, 3e-7, embedding[:half].shape)
    embedding[half:] = embedding[:half] * (1 + noise).astype(np.float32)
    write_weights(source, weights)
    made: dict[WeightFormat, BoundSession] = {}

    def bound(form: WeightFormat) -> BoundSession:
        if form not in made:
            # The head keeps its bits, or the twins would be the same; what is before it decides the noise.
            recipe = ExportRecipe(form, head=FP32)
            made[form] = bind(export_checkpoint(source, source.parent / str(form), recipe).bundle)
        return made[form]

    return bound


def prompts(count: int) -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(5, VOCABULARY, random.integers(2, 30)).tolist() for _ in range(count)]


def run(
    bound: BoundSession,
    prompt: list[int],
    params: SamplingParams = GREEDY,
    speculator: Speculator | None = None,
    epsilon: float = 0.0,
    limits: DecodeLimits = LIMITS,
) -> tuple[list[int], NearTies, list[Step]]:
    """Decode from an empty arena."""
    bound.arena.rewind_to(0)
    sampler = Sampler(params, VOCABULARY)
    near_ties = NearTies(bound, sampler, epsilon, lambda: False)
    steps = list(decode(bound, prompt, sampler, limits, speculator, near_ties))
    return tokens_of(steps), near_ties, steps


def tokens_of(steps: Iterable[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


def speculators(text: list[int]) -> dict[str, Speculator]:
    """Speculators by name; `text` is the expected output, prompt included."""
    named = adversaries(text, VOCABULARY, 0)
    free = eager(SuffixDrafter(), RecyclingDrafter(RecycledTable(VOCABULARY)))
    return {
        "free": free,
        **{name: speculator_of(named[name]) for name in ("oracle", "nearly right", "wide", "unsteady")},
    }


def oracle(text: list[int]) -> Speculator:
    return speculators(text)["oracle"]


def epsilon_of(bound: BoundSession) -> float:
    return measure_width_noise(bound, [prompt * 6 for prompt in prompts(3)]).epsilon


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("params", some_nightly([GREEDY, PENALIZED], every=2), ids=["plain", "penalized"])
def test_output_is_plain_decodings_although_wide_passes_differ(
    twins: Callable[[WeightFormat], BoundSession], form: WeightFormat, params: SamplingParams
) -> None:
    bound = twins(form)
    epsilon = epsilon_of(bound)
    differing = recomputed = 0
    for prompt in prompts(6):
        plain, _, _ = run(bound, prompt, params)
        for speculator in speculators([*prompt, *plain]).values():
            differing += run(bound, prompt, params, speculator)[0] != plain
        for name, speculator in speculators([*prompt, *plain]).items():
            exact, near_ties, steps = run(bound, prompt, params, speculator, epsilon)
            assert exact == plain, name
            assert sum(step.produced for step in steps) == len(plain)
            assert bound.arena.length == len(prompt) + len(plain) - 1
            assert sum(step.target_passes for step in steps[1:]) - (len(steps) - 1) == near_ties.passes
            assert bound.arena.last_prefill[1] == len(prompt)
            recomputed += near_ties.passes
    assert differing  # or this shows nothing
    assert recomputed


def test_clear_choices_are_not_recomputed(tiny_bundle: Path) -> None:
    bound = bind(tiny_bundle)
    epsilon = epsilon_of(bound)
    assert 0 < epsilon < 1e-3
    for prompt in prompts(3):
        plain, _, _ = run(bound, prompt)
        text, near_ties, steps = run(bound, prompt, speculator=oracle([*prompt, *plain]), epsilon=epsilon)
        assert text == plain
        assert near_ties.passes == 0
        assert len(steps) < len(plain) / 2


def test_plain_rounds_have_no_near_ties(twins: Callable[[WeightFormat], BoundSession]) -> None:
    bound = twins(INT8)
    for prompt in prompts(3):
        plain, _, _ = run(bound, prompt)
        text, near_ties, steps = run(bound, prompt, epsilon=EVERYTHING)
        assert (text, near_ties.passes) == (plain, 0)
        assert {step.target_passes for step in steps} == {1}


def test_slots_of_an_earlier_answer_are_recomputed_first(tiny_bundle_of: Callable[[str, str], Path]) -> None:
    """A conversation: the second answer reads the first one's cache slots, which wide passes have written."""
    bound = bind(tiny_bundle_of("llama", "int8"))
    prompt, question, short = prompts(1)[0], [33, 44, 55], DecodeLimits(12)
    plain, _, _ = run(bound, prompt, limits=short)

    def rows_after(near_ties: NearTies | None) -> np.ndarray:
        sampler = Sampler(GREEDY, VOCABULARY)
        steps = list(decode(bound, [*prompt, *plain, *question], sampler, LIMITS, None, near_ties))
        assert steps[0].target_passes == 1 + (0 if near_ties is None else near_ties.passes)
        return bound.arena.snapshot()[0]

    expected = rows_after(None)
    assert run(bound, prompt, speculator=oracle([*prompt, *plain]), limits=short)[0] == plain
    noisy = bound.arena.length - bound.arena.plain_length
    assert (rows_after(None) != expected).any()
    assert run(bound, prompt, speculator=oracle([*prompt, *plain]), limits=short)[0] == plain
    near_ties = NearTies(bound, Sampler(GREEDY, VOCABULARY), 0.0, lambda: False)
    np.testing.assert_array_equal(rows_after(near_ties), expected)
    assert near_ties.passes == noisy > 0


def test_a_full_context(twins: Callable[[WeightFormat], BoundSession]) -> None:
    bound = twins(INT8)
    epsilon = epsilon_of(bound)
    prompt = (prompts(1)[0] * 40)[:240]
    plain, _, _ = run(bound, prompt, limits=DecodeLimits())
    for name, speculator in speculators([*prompt, *plain]).items():
        text, _, steps = run(bound, prompt, speculator=speculator, epsilon=epsilon, limits=DecodeLimits())
        assert (text, steps[-1].finish) == (plain, FinishReason.LENGTH), name


@pytest.mark.parametrize("after", [0, 1, 2, 3, 5, 8, 13, 21, 34])
def test_cancelling_while_recomputing(twins: Callable[[WeightFormat], BoundSession], after: int) -> None:
    bound = twins(INT8)
    prompt = prompts(1)[0]
    plain, _, _ = run(bound, prompt)
    asked: list[None] = []

    def cancelled() -> bool:
        asked.append(None)
        return len(asked) > after

    bound.arena.rewind_to(0)
    sampler = Sampler(GREEDY, VOCABULARY)
    near_ties = NearTies(bound, sampler, EVERYTHING, cancelled)
    steps = list(
        decode(bound, prompt, sampler, DecodeLimits(40, cancelled=cancelled), oracle([*prompt, *plain]), near_ties)
    )
    tokens = tokens_of(steps)
    assert steps[-1].finish is FinishReason.CANCELLED
    assert tokens == plain[: len(tokens)]
    assert bound.arena.length <= len(prompt) + len(tokens)
    whole = [*prompt, *tokens]
    rest = list(decode(bound, whole, Sampler(GREEDY, VOCABULARY), DecodeLimits(5)))
    assert len(tokens_of(rest)) == 5


def test_an_end_token_behind_a_near_tie_ends_the_answer(twins: Callable[[WeightFormat], BoundSession]) -> None:
    bound = twins(FP32)
    epsilon = epsilon_of(bound)
    for prompt in prompts(4):
        free, _, _ = run(bound, prompt)
        limits = DecodeLimits(40, frozenset({free[9]}))
        plain, _, expected = run(bound, prompt, limits=limits)
        for name, speculator in speculators([*prompt, *free]).items():
            text, _, steps = run(bound, prompt, speculator=speculator, epsilon=epsilon, limits=limits)
            assert text == plain, name
            assert steps[-1].finish is expected[-1].finish


def test_drafting_that_is_always_recomputed_is_disabled(twins: Callable[[WeightFormat], BoundSession]) -> None:
    bound = twins(FP32)
    prompt = prompts(1)[0]
    limits = DecodeLimits(200)
    plain, _, _ = run(bound, prompt, limits=limits)
    text, _, steps = run(bound, prompt, speculator=oracle([*prompt, *plain]), epsilon=EVERYTHING, limits=limits)
    assert text == plain
    speculated = [step.round for step in steps if step.round is not None]
    assert any("near tie" in one.note for one in speculated)
    assert len(speculated) < 40
    assert sum(step.target_passes for step in steps) < 1.25 * len(plain)


def test_exact_answers_of_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exact answer is that of `Speculation.OFF`, greedy and sampled, and the exactness report is stored."""
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "cache"))
    bundle = write_bundle(tmp_path, weights=INT8)
    with edgerun.load(bundle) as engine:
        for changes in ({}, {"temperature": 0.9, "seed": 3}, {"repeat_penalty": 1.2}):
            for prompt in ("the other on the other on the", "and in the end"):
                expected = engine.generate(prompt, max_tokens=60, speculation=Speculation.OFF, **changes)
                exact = engine.generate(prompt, max_tokens=60, exact=True, **changes)
                assert exact.text == expected.text
                if "seed" in changes:
                    assert exact.stats.drafted == 0
        known = engine.model.drafters.exactness_report(())
    assert len(list((tmp_path / "cache" / "exactness").iterdir())) == 1
    with edgerun.load(bundle) as engine:
        assert engine.model.drafters.exactness_report(()) == known
