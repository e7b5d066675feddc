"""Aligned answers approach the model's own distribution on condition of the grammar."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

pytest.importorskip("llguidance", reason="needs the extra structured")

from edgerun import EdgeError, Engine, GenerateOptions, InputError, ResponseFormat, Speculation
from edgerun.runtime.decode import DecodeLimits, decode
from edgerun.runtime.sampling.sampler import SamplingParams
from edgerun.runtime.sampling.token_mask import DeadEndError
from edgerun.runtime.speculation.drafters.recycling import RecycledTable, RecyclingDrafter
from edgerun.runtime.speculation.drafters.suffix import SuffixDrafter
from edgerun.runtime.structure.expected_futures import ExpectedFutures
from edgerun.runtime.structure.grammar_aligned import AlignedSampler
from support.adversarial_drafters import eager
from support.emulated_graph import EmulatedGraph, Floats, Text
from support.small_grammars import EOS, V, enumerated, started, toy_logits

PROMPT = (1, 2, 5)
GRAMMAR = 'start: "a" /(c|b){4}/ | "b" /[abc]{1,3}/ | "ca"'
"""Most of the model's texts that begin with an a do not go on as the grammar allows."""
LIMITS = DecodeLimits(12, frozenset({EOS}))


def conditional() -> dict[Text, float]:
    """The model's distribution on condition of the grammar, by enumeration."""

    def log_probability(answer: Text) -> float:
        total, text = 0.0, PROMPT
        # An answer behind which nothing may come has its end all the same.
        for token in (*answer, EOS) if can_end_itself(answer) else answer:
            logits = toy_logits(text).astype(np.float64)
            total += float(logits[token] - np.log(np.exp(logits).sum()))
            text = (*text, token)
        return total

    answers = enumerated(GRAMMAR, toy_logits, PROMPT, SamplingParams(1.0), 12)
    weights = {answer: math.exp(log_probability(answer)) for answer in answers}
    total = sum(weights.values())
    return {answer: weight / total for answer, weight in weights.items()}


def can_end_itself(answer: Text) -> bool:
    """Whether the end of an answer is chosen, and not the only possibility."""
    *first, last = answer
    state = started(GRAMMAR)
    state.observe(first)
    return not state.ends_with(last)


def induced(futures: ExpectedFutures) -> dict[Text, float]:
    """The distribution of the next sample, by enumeration."""
    found: dict[Text, float] = {}
    waiting: list[tuple[Text, float]] = [((), 1.0)]
    while waiting:
        answer, weight = waiting.pop()
        state = started(GRAMMAR)
        state.observe(answer)
        futures.begin(answer)
        sampler = AlignedSampler(SamplingParams(1.0), V, state, futures)
        ids, probabilities = sampler.probabilities(toy_logits((*PROMPT, *answer)))
        for token, probability in zip(ids.tolist(), probabilities.tolist(), strict=True):
            if not probability:
                continue
            if token == EOS or state.ends_with(token):
                whole = answer if token == EOS else (*answer, token)
                found[whole] = found.get(whole, 0.0) + weight * probability
            else:
                waiting.append(((*answer, token), weight * probability))
    return found


def sample(futures: ExpectedFutures, seed: int, *, drafts: bool) -> Text:
    state = started(GRAMMAR)
    futures.begin()
    sampler = AlignedSampler(SamplingParams(1.0, seed=seed), V, state, futures)
    speculator = eager(SuffixDrafter(), RecyclingDrafter(RecycledTable(V))) if drafts else None
    steps = list(decode(EmulatedGraph(toy_logits, V, 64), PROMPT, sampler, LIMITS, speculator, constraint=state))
    futures.finish()
    return tuple(token for step in steps for token in step.tokens)


def divergence(expected: dict[Text, float], found: dict[Text, float]) -> float:
    return sum(weight * math.log(weight / found[answer]) for answer, weight in expected.items())


def test_the_divergence_from_the_conditional_distribution_falls_with_the_number_of_samples() -> None:
    expected, futures, divergences = conditional(), ExpectedFutures(), []
    for count in range(401):
        if count in (0, 10, 50, 400):
            found = induced(futures)
            assert sum(found.values()) == pytest.approx(1)
            divergences.append(divergence(expected, found))
        sample(futures, count, drafts=False)
    renormalized = divergence(expected, enumerated(GRAMMAR, toy_logits, PROMPT, SamplingParams(1.0), 12))
    assert divergences[0] == pytest.approx(renormalized)
    assert divergences[0] > 0.01
    assert divergences == sorted(divergences, reverse=True)
    assert divergences[-1] < divergences[0] / 20


def test_samples_do_not_depend_on_drafting() -> None:
    plain, drafted = ExpectedFutures(), ExpectedFutures()
    for seed in range(60):
        assert sample(plain, seed, drafts=False) == sample(drafted, seed, drafts=True)
    assert induced(plain) == pytest.approx(induced(drafted))


def test_dead_ends_are_avoided_once_they_are_known() -> None:
    """The grammar needs a text that no token can write, but after one of two beginnings only."""

    def logits_after(text: Text) -> Floats:
        logits = np.zeros(V, np.float32)
        logits[1] = 3.0
        return logits

    futures, ends = ExpectedFutures(), 0
    for seed in range(10):
        state = started('start: "a" "xyz" | "b" "c"')
        futures.begin()
        sampler = AlignedSampler(SamplingParams(1.0, seed=seed), V, state, futures)
        try:
            steps = list(decode(EmulatedGraph(logits_after, V, 64), PROMPT, sampler, LIMITS, constraint=state))
        except DeadEndError:
            ends += 1
        else:
            assert [token for step in steps for token in step.tokens] == [2, 3]
        finally:
            futures.finish()
    assert ends == 1


def test_a_model_that_computes_no_numbers_is_named() -> None:
    futures, state = ExpectedFutures(), started(GRAMMAR)
    futures.begin()
    sampler = AlignedSampler(SamplingParams(1.0), V, state, futures)
    logits = toy_logits(PROMPT).copy()
    logits[1] = np.nan
    with pytest.raises(EdgeError, match="the model computes NaN logits") as raised:
        sampler.choose(logits, 0)
    assert not isinstance(raised.value, DeadEndError)


def test_an_engine_gives_the_last_of_several_samples(eager_engine: Engine) -> None:
    options = GenerateOptions(raw=True, temperature=1.0, seed=5, response_format=ResponseFormat.regex("[a-c]{3,9}"))
    one = eager_engine.generate("the", options)
    reply = eager_engine.generate("the", options, grammar_aligned=4)
    assert re.fullmatch("[a-c]{3,9}", reply.text)
    assert reply.stats.completion_tokens > one.stats.completion_tokens
    assert reply.stats.answers == 4
    plain = eager_engine.generate("the", options, grammar_aligned=4, speculation=Speculation.OFF)
    assert plain.text == reply.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grammar_aligned": -1}, "grammar_aligned is -1"),
        ({"response_format": None}, "without response_format"),
        ({"top_k": 3}, "top_k"),
        ({"exact": True}, "exact"),
        ({"temperature": 0.0}, "without a temperature"),
    ],
)
def test_what_an_aligned_answer_cannot_have_is_refused(
    eager_engine: Engine, changes: dict[str, object], message: str
) -> None:
    options = {"temperature": 1.0, "response_format": ResponseFormat.json_object(), "grammar_aligned": 2, **changes}
    with pytest.raises(InputError, match=message):
        eager_engine.generate("the", raw=True, **options)
