"""Where a draft model is run: against the definition of its gain, and the waits when it does not pay."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun.runtime.speculation.learned_rates import DraftModelValue

SHARES = st.floats(0, 1)


@given(
    st.lists(st.tuples(SHARES, SHARES), max_size=40),
    SHARES,
    SHARES,
    st.floats(0, 1.2),
    st.floats(0, 2),
    st.booleans(),
)
def test_a_pass_pays_where_its_gain_exceeds_its_cost(seen, path_prob, free_prob, price, cost, at_anchor) -> None:
    value = DraftModelValue()
    for free, best in seen:
        value.observe(free, best)
    histogram = value._after[min(int(free_prob * 6), 5)]
    total = sum(histogram)
    # Ten bins of the best probability after the pass; below the price of a position the candidate is not used.
    expected = sum(
        max(0.0, path_prob * (step + 0.5) / 10 - price) * count / total for step, count in enumerate(histogram)
    )
    gain = expected - max(0.0, path_prob * free_prob - price)
    if abs(gain - cost) < 1e-9:
        return
    assert value.pays(path_prob, free_prob, price, cost, at_anchor=at_anchor) == (gain > cost)
    if at_anchor:
        assert value.gain == pytest.approx(gain, abs=1e-9)
        assert value.cost == cost


def test_a_model_that_does_not_pay_is_run_after_waits_that_double_up_to_a_limit() -> None:
    value, rounds = DraftModelValue(), []
    for number in range(1, 2200):
        if value.pays(1.0, 0.5, 0.1, 5.0, at_anchor=True):
            rounds.append(number)
        # Behind the anchor it is never run against expectation, and such calls do not count.
        assert not value.pays(1.0, 0.5, 0.1, 5.0, at_anchor=False)
    waits = [later - earlier for earlier, later in zip([0, *rounds], rounds, strict=False)]
    assert waits == [8, 16, 32, 64, 128, 256, 512, 512, 512]


def test_a_model_that_pays_again_resets_the_waits() -> None:
    value = DraftModelValue()
    for _ in range(100):
        value.pays(1.0, 0.0, 0.1, 5.0, at_anchor=True)
    assert value.pays(1.0, 0.0, 0.1, 0.0, at_anchor=True)
    assert [value.pays(1.0, 0.0, 0.1, 5.0, at_anchor=True) for _ in range(8)] == [False] * 7 + [True]


def test_what_must_not_be_tried_is_not_tried() -> None:
    value = DraftModelValue()
    assert not any(value.pays(1.0, 0.0, 0.1, math.inf, at_anchor=True) for _ in range(100))
    assert not value.pays(1.0, 0.0, 0.1, 5.0, at_anchor=True)  # and does not count as a wait


def test_old_observations_fade() -> None:
    value = DraftModelValue()
    for _ in range(5000):
        value.observe(0.1, 0.95)
    assert value.pays(1.0, 0.1, 0.2, 0.5, at_anchor=False)
    for _ in range(800):
        value.observe(0.1, 0.12)
    assert not value.pays(1.0, 0.1, 0.2, 0.3, at_anchor=False)
    assert all(sum(bins) <= 401 for bins in value._after)
    assert value._weight == pytest.approx([sum(bins) for bins in value._after])
