"""Arithmetic on next-token distributions, against dense arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from edgerun.runtime.sampling.distribution import Distribution
from edgerun.runtime.sampling.sampler import drawn_index

V = 12


@st.composite
def distributions(draw: st.DrawFn) -> Distribution:
    weights = np.array(draw(st.lists(st.integers(0, 5), min_size=V, max_size=V).filter(any)), np.float64)
    # A distribution may list tokens of probability 0.
    ids = np.flatnonzero((weights > 0) | np.array(draw(st.lists(st.booleans(), min_size=V, max_size=V))))
    return Distribution(ids, weights[ids] / weights.sum())


def dense(distribution: Distribution) -> npt.NDArray[np.float64]:
    values = np.zeros(V)
    values[distribution.ids] = distribution.probs
    return values


@given(p=distributions(), q=distributions(), scale=st.sampled_from([1.0, 0.5, 0.0]))
def test_excess_and_residual_are_those_of_dense_arrays(p: Distribution, q: Distribution, scale: float) -> None:
    expected = np.maximum(0, scale * dense(p) - dense(q))
    np.testing.assert_allclose(p.excess(q, scale), expected[p.ids], atol=1e-15)
    if expected.sum() > 1e-12:
        np.testing.assert_allclose(dense(p.residual(q, scale)), expected / expected.sum(), atol=1e-12)
    assert dense(p.residual(q, scale)).sum() > 1 - 1e-12


@given(distribution=distributions(), token=st.integers(0, V - 1))
def test_the_other_tokens_keep_their_ratios_without_a_token(distribution: Distribution, token: int) -> None:
    expected = dense(distribution)
    assert distribution.probability(token) == expected[token]
    expected[token] = 0
    conditional = distribution.without(token)
    if expected.any():
        np.testing.assert_allclose(dense(conditional), expected / expected.sum(), atol=1e-15)
    else:
        assert conditional.ids.size == 0


@given(distribution=distributions(), uniform=st.floats(0, 1, exclude_max=True))
def test_a_draw_is_the_inverse_of_the_cumulative_distribution(distribution: Distribution, uniform: float) -> None:
    values = dense(distribution)
    token = distribution.draw(uniform)
    assert values[token] > 0
    assert values[:token].sum() <= uniform + 1e-12
    assert uniform <= values[: token + 1].sum() + 1e-12


def test_a_draw_of_many_tokens_is_that_of_their_whole_cumulative_sum() -> None:
    random = np.random.default_rng(5)
    weights = np.where(random.random(5000) < 0.5, 0.0, random.exponential(size=5000))
    weights[1024:2048] = 0
    weights[-1] = 0
    cumulative = np.cumsum(weights)
    for uniform in (0.0, *random.random(2000).tolist(), float(np.nextafter(1, 0))):
        index = drawn_index(weights, uniform)
        assert weights[index] > 0
        at = uniform * cumulative[-1]
        assert cumulative[index] - weights[index] - 1e-9 <= at <= cumulative[index] + 1e-9


def test_the_largest_uniform_number_draws_a_token_of_positive_probability() -> None:
    distribution = Distribution(np.arange(4), np.array([0.1, 0.2, 0.7, 0.0]))
    assert distribution.draw(float(np.nextafter(1, 0))) == 2
    assert distribution.draw(1.0) == 2


def test_the_residual_is_the_distribution_itself_where_rounding_leaves_no_excess() -> None:
    distribution = Distribution(np.arange(3), np.array([0.1, 0.2, 0.7]))
    assert distribution.residual(distribution) is distribution
    assert distribution.residual(Distribution(distribution.ids, distribution.probs + 1e-17)) is distribution
