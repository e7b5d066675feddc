"""The sampler, against a slow textbook version of every step."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edgerun import EdgeError, InputError
from edgerun.runtime.sampling.distribution import Distribution, Purpose, uniforms_at
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams, uniform_at
from support.nightly import examples


def naive_distribution(
    logits: npt.NDArray[np.float32], params: SamplingParams, prompt: list[int], answer: list[int]
) -> npt.NDArray[np.float64]:
    """The textbook pipeline, written the slow way: penalties, biases, temperature, top-k, top-p, min-p."""
    scores = logits.astype(np.float64)
    for token in {*prompt, *answer}:
        p = params.repeat_penalty
        scores[token] = np.float32(logits[token] / p) if logits[token] > 0 else np.float32(logits[token] * p)
    for token in answer:
        scores[token] -= params.frequency_penalty
    for token in set(answer):
        scores[token] -= params.presence_penalty
    for token, bias in params.logit_bias:
        scores[token] += bias
    scores = scores / params.temperature
    if 0 < params.top_k < scores.size:
        scores[scores < np.sort(scores)[-params.top_k]] = -np.inf
    p = np.exp(scores - scores.max())
    p /= p.sum()
    if params.top_p < 1:
        mass = 0.0
        for value in np.sort(p)[::-1]:
            mass += value
            if mass >= params.top_p:
                p[p < value] = 0
                break
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()


def _large_logits(size: int, distinct: int, seed: int) -> npt.NDArray[np.float32]:
    """`size` logits of at most `distinct` different values, so that there are many ties."""
    random = np.random.default_rng(seed)
    return random.choice(random.integers(-40, 41, distinct), size).astype(np.float32) / 4


# Quarter steps keep every comparison at a filter's edge free of rounding.
LOGITS = arrays(np.float32, st.integers(2, 40), elements=st.integers(-40, 40).map(lambda i: np.float32(i / 4))) | (
    st.builds(_large_logits, st.integers(1000, 5000), st.integers(1, 81), st.integers(0, 1 << 32))
)


@given(
    logits=LOGITS,
    temperature=st.sampled_from([0.25, 0.5, 1.0, 2.0]),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.1, 0.337, 0.5, 0.913, 1.0]),
    min_p=st.sampled_from([0.0, 0.0123, 0.177]),
    penalty=st.sampled_from([1.0, 2.0, 0.5]),
    presence=st.sampled_from([0.0, 0.5, -2.0]),
    frequency=st.sampled_from([0.0, 0.25, -1.5]),
    data=st.data(),
)
@settings(max_examples=examples(300))
def test_probabilities_equal_the_textbook_pipeline(
    logits, temperature, top_k, top_p, min_p, penalty, presence, frequency, data
) -> None:
    tokens = st.integers(0, logits.size - 1)
    bias = data.draw(st.lists(st.tuples(tokens, st.sampled_from([-100.0, -0.25, 3.0])), max_size=3))
    params = SamplingParams(
        temperature,
        top_k,
        top_p,
        min_p,
        repeat_penalty=penalty,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=tuple(bias),
    )
    prompt, answer = data.draw(st.lists(tokens, max_size=5)), data.draw(st.lists(tokens, max_size=5))
    sampler = Sampler(params, logits.size)
    sampler.observe_prompt(prompt)
    sampler.observe(answer)
    before = logits.copy()
    ids, probabilities = sampler.probabilities(logits)
    dense = np.zeros(logits.size)
    dense[ids] = probabilities
    expected = naive_distribution(logits, params, prompt, answer)
    np.testing.assert_allclose(dense, expected, rtol=1e-6, atol=1e-12)
    assert (np.diff(ids) > 0).all()
    np.testing.assert_array_equal(logits, before)


def test_a_choice_is_the_inverse_of_the_cumulative_distribution() -> None:
    logits = np.log(np.array([0.25, 0.25, 0.5], np.float32))
    sampler = Sampler(SamplingParams(temperature=1.0, seed=3), 3)
    for position in range(200):
        u = uniform_at(3, position)
        assert sampler.choose(logits, position) == (0 if u < 0.25 else 1 if u < 0.5 else 2)


def test_the_random_numbers_of_a_seed_do_not_change_between_versions() -> None:
    """The text of a seed must not change from one version to the next."""
    assert [uniform_at(*key) for key in ((0, 0), (7, 12), (2**64 - 1, 3))] == [
        0.011546754286331562,
        0.04774028854427814,
        0.10224385374061784,
    ]


def test_random_numbers_differ_between_purposes_positions_and_parts() -> None:
    keys = [
        (seed, position, purpose, part)
        for seed in range(3)
        for position in range(20)
        for purpose in Purpose
        for part in range(3)
    ]
    values = {key: tuple(uniforms_at(key[0], key[1], 9, key[2], key[3]).tolist()) for key in keys}
    plain = [uniform_at(seed, position) for seed in range(3) for position in range(200)]
    everything = [number for row in values.values() for number in row]
    assert len({*everything, *plain}) == len(everything) + len(plain)
    assert all(0 <= number < 1 for number in plain)
    seed, position, purpose, part = keys[-1]
    assert tuple(uniforms_at(seed, position, 2, purpose, part).tolist()) == values[keys[-1]][:2]


@given(data=st.data())
def test_rollback_restores_the_counts_of_the_answer(data) -> None:
    tokens = st.lists(st.integers(0, 5), max_size=8)
    params = SamplingParams(temperature=1.0, repeat_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    logits = np.arange(6, dtype=np.float32)
    sampler = Sampler(params, 6)
    sampler.observe_prompt(data.draw(tokens))
    sampler.observe(data.draw(tokens))
    before = Distribution.of(sampler, logits)
    with suppress(IndexError), sampler.rollback():
        sampler.observe(data.draw(tokens))
        with sampler.rollback():
            sampler.observe(data.draw(tokens))
        sampler.observe([*data.draw(tokens), 6])
    np.testing.assert_array_equal(Distribution.of(sampler, logits).probs, before.probs)


def test_a_bias_for_a_token_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(InputError, match="logit_bias has token 6; token ids of this model are 0 to 5"):
        Sampler(SamplingParams(logit_bias=((6, 1.0),)), 6)


def test_a_distribution_stays_valid_after_the_next_call() -> None:
    sampler = Sampler(SamplingParams(temperature=0.8, top_k=3), 5)
    logits = np.array([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]], np.float32)
    distribution = Distribution.of(sampler, logits[0])
    Distribution.of(sampler, logits[1])
    ids, probs = sampler.probabilities(logits[0])
    np.testing.assert_array_equal(distribution.ids, ids)
    np.testing.assert_array_equal(distribution.probs, probs)
    certain = Distribution.of(Sampler(SamplingParams(), 5), logits[0])
    assert (certain.ids.tolist(), certain.probs.tolist()) == ([4], [1.0])


def test_greedy_takes_the_lowest_id_of_a_tie_and_avoids_penalized_tokens() -> None:
    assert Sampler(SamplingParams(), 4).choose(np.array([1, 3, 3, 2], np.float32), 0) == 1
    sampler = Sampler(SamplingParams(repeat_penalty=2.0), 3)
    sampler.observe([1])
    assert sampler.choose(np.array([1.0, 1.5, 0.0], np.float32), 0) == 0
    assert sampler.choose(np.array([-4.0, -1.5, -3.5], np.float32), 0) == 1


def test_a_choice_allocates_no_array_of_vocabulary_size() -> None:
    import tracemalloc

    size = 200_000
    logits = np.random.default_rng(0).normal(0, 5, size).astype(np.float32)
    for params in (
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.8, top_k=40),
        SamplingParams(temperature=0.8, top_p=0.9, repeat_penalty=1.1),
        SamplingParams(temperature=0.8, min_p=0.05),
        SamplingParams(),
    ):
        sampler = Sampler(params, size)
        sampler.observe([1, 2, 3])
        sampler.choose(logits, 0)
        tracemalloc.start()
        sampler.choose(logits, 1)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < size, params


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1}, "temperature is -1; it must be 0 (greedy), or between 0.0001 and 10000"),
        ({"temperature": float("nan")}, "temperature is nan; it must be 0 (greedy), or between 0.0001 and 10000"),
        ({"top_k": -1}, "top-k is -1; it must be 0 (off) or more"),
        ({"top_p": 0.0}, "top-p is 0.0; it must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top-p is 1.5; it must be above 0 and at most 1"),
        ({"min_p": 1.0}, "min-p is 1.0; it must be at least 0 and below 1"),
        ({"repeat_penalty": 0.0}, "repeat-penalty is 0.0; it must be between 0.01 and 100"),
        ({"presence_penalty": 2.5}, "presence-penalty is 2.5; it must be between -2 and 2"),
        ({"frequency_penalty": float("nan")}, "frequency-penalty is nan; it must be between -2 and 2"),
        ({"logit_bias": ((1, 101.0),)}, "a logit bias is 101.0; it must be between -100 and 100"),
        ({"seed": -1}, "seed is -1; it must be at least 0 and below 2 to the 64th"),
    ],
)
def test_parameters_out_of_range_are_refused(fields, message) -> None:
    with pytest.raises(InputError) as caught:
        SamplingParams(**fields)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(repeat_penalty=1.5),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5, top_k=2, top_p=0.9, min_p=0.1, repeat_penalty=1.1),
    ],
)
@pytest.mark.parametrize("size", [5, 5000])
def test_logits_that_are_not_numbers_are_an_error(params: SamplingParams, size: int) -> None:
    logits = np.linspace(-1, 1, size, dtype=np.float32)
    for damage, what in ((np.nan, "NaN"), (np.inf, "infinite")):
        damaged = logits.copy()
        damaged[size // 2] = damage
        sampler = Sampler(params, size)
        with pytest.raises(EdgeError, match=f"the model computes {what} logits; its weights are damaged"):
            sampler.choose(damaged, 3)
        with pytest.raises(EdgeError):
            Distribution.of(sampler, damaged)
    allowed = logits.copy()
    allowed[0] = -np.inf  # a token that the graph excludes
    assert Sampler(params, size).choose(allowed, 3) > 0
