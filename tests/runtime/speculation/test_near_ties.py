"""Exact greedy output equals plain decoding where wide passes would choose other tokens, whatever is drafted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from support.adversarial_drafters import adversaries, eager
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
        **{name: eager(named[name]) for name in ("oracle", "nearly right", "wide", "unsteady")},
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


def test_a_full_context(twins: Callable[[WeightFormat], BoundSession]) -> None:
    bound = twins(INT8)
    epsilon = epsilon_of(bound)
    prompt = (prompts(1)[0] * 40)[:240]
    plain, _, _ = run(bound, prompt, limits=DecodeLimits())
    for name, speculator in speculators([*prompt, *plain]).items():
        text, _, steps = run(bound, prompt, speculator=speculator, epsilon=epsilon, limits=DecodeLimits())
        assert (text, steps[-1].finish) == (plain, FinishReason.LENGTH), name


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


def test_exact_answers_of_an_engine(tmp_path: Path, cache: Path) -> None:
    """An exact answer is that of `Speculation.OFF`, greedy and sampled, and the exactness report is stored."""
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


def turn(
    bound: BoundSession,
    prompt: list[int],
    speculator: Speculator | None,
    epsilon: float | None,
    check: Callable[[], None],
) -> list[int]:
    """The tokens of one answer; `check` is called after every round."""
    sampler = Sampler(GREEDY, VOCABULARY)
    near_ties = None if epsilon is None else NearTies(bound, sampler, epsilon, lambda: False)
    tokens: list[int] = []
    for step in decode(bound, prompt, sampler, DecodeLimits(16), speculator, near_ties):
        tokens += step.tokens
        check()
    return tokens


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1e9], ids=["none again", "some again", "all again"])
def test_slots_marked_as_plain_equal_plain_decodings(
    tiny_bundle_of: Callable[[str, str], Path], epsilon: float
) -> None:
    """With 8-bit weights and activations, wide passes differ from narrow ones."""
    bundle, other_rows = tiny_bundle_of("qwen3", "int8"), False
    for seed in range(6):
        random = np.random.default_rng(seed)
        plain, fast = bind(bundle), bind(bundle)
        speculator = eager(SuffixDrafter(), RecyclingDrafter(RecycledTable(VOCABULARY)))
        text: list[int] = []
        for kept in (0, 3, 12):
            # The sequence up to somewhere in the last answer, and a few more tokens.
            same = max(0, len(text) - 16 + kept) if text else 0
            prompt = [*text[:same], *random.integers(5, VOCABULARY, 9).tolist()]
            for bound in (plain, fast):
                bound.arena.rewind_to(min(bound.arena.length, same))
            assert fast.arena.length == plain.arena.length
            text = [*prompt, *turn(plain, prompt, None, None, lambda: None)]
            (rows,) = plain.arena.snapshot()

            def check(fast: BoundSession = fast, rows: np.ndarray = rows, begun: int = len(prompt)) -> None:
                nonlocal other_rows
                arena = fast.arena
                assert begun <= arena.plain_length <= arena.length
                (own,) = arena.snapshot()
                np.testing.assert_array_equal(own[..., : arena.plain_length, :], rows[..., : arena.plain_length, :])
                other_rows |= not np.array_equal(own, rows[..., : arena.length, :])

            drafter = speculator if kept else eager(adversaries(text, VOCABULARY, 0, seed)["nearly right"])
            assert [*prompt, *turn(fast, prompt, drafter, epsilon, check)] == text or epsilon == 0
            if epsilon == 0:
                break
    # Had all been the same anyway, this would show nothing.
    assert other_rows or epsilon > 1


@given(st.integers(0, 10_000), st.sampled_from([2, 3, 64, 127, 128, 191, 192, 300]), st.sampled_from([1.0, 1.5, 0.7]))
def test_the_margin_is_that_of_the_best_logit_over_the_second(seed: int, size: int, penalty: float) -> None:
    random = np.random.default_rng(seed)
    logits = (random.integers(-8, 9, size) / 4).astype(np.float32)
    sampler = Sampler(SamplingParams(repeat_penalty=penalty), size)
    seen = random.integers(0, size, 5)
    sampler.observe(seen)
    scores = logits.astype(np.float64)
    for token in set(seen.tolist()):
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    first, second = sorted(scores)[:-3:-1]
    assert sampler.top_two_margin(logits) == pytest.approx(first - second, abs=1e-6)
