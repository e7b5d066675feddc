"""Log-probabilities equal those of float64 arithmetic, whatever the logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun.runtime.sampling.logprobs import LogSoftmax


def naive(logits: np.ndarray, k: int) -> tuple[np.ndarray, list[int]]:
    """All log-probabilities, and the `k` most probable ids, in float64 with sorting."""
    exact = logits.astype(np.float64)
    exact -= exact.max()
    logprobs = exact - np.log(np.exp(exact).sum())
    return logprobs, sorted(range(len(logits)), key=lambda token: (-logprobs[token], token))[:k]


@given(seed=st.integers(0, 10_000), scale=st.sampled_from([0.0, 1e-3, 1.0, 8.0, 300.0]), k=st.integers(0, 20))
@pytest.mark.parametrize("size", [2, 7, 300, 5000])
def test_they_are_those_of_a_naive_softmax(size: int, seed: int, scale: float, k: int) -> None:
    random = np.random.default_rng(seed)
    logits = (random.standard_normal(size) * scale + random.integers(-50, 50)).astype(np.float32)
    before = logits.copy()
    token = int(random.integers(size))
    expected, best = naive(logits, k)
    found = LogSoftmax(k, size).at(logits, token)
    tolerance = 1e-6 * max(1.0, float(np.abs(logits).max()))
    assert found.token_id == token
    assert found.logprob == pytest.approx(expected[token], abs=tolerance)
    assert [other for other, _ in found.top] == best
    assert [logprob for _, logprob in found.top] == pytest.approx(expected[best].tolist(), abs=tolerance)
    assert all(logprob <= 0 for _, logprob in found.top)
    assert found.logprob <= 0
    np.testing.assert_array_equal(logits, before)


def test_alternatives_of_probability_zero_are_left_out() -> None:
    logits = np.full(300, -np.inf, np.float32)
    logits[[3, 9]] = 2.5
    found = LogSoftmax(5, 300).at(logits, 9)
    assert found.top == ((3, found.logprob), (9, found.logprob))
    assert found.logprob == pytest.approx(math.log(0.5))
    assert LogSoftmax(0, 300).at(logits, 4).logprob == -math.inf
