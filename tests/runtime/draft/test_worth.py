"""When a draft model is asked: against its definition, and for the waits of one that does not pay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun.runtime.speculation.draft_value import DraftWorth

SHARES = st.floats(0, 1)


@given(
    st.lists(st.tuples(SHARES, SHARES), max_size=40),
    SHARES,
    SHARES,
    st.floats(0, 1.2),
    st.floats(0, 2),
    st.booleans(),
)
def test_asking_pays_where_it_is_expected_to_add_more_than_it_costs(seen, reached, free, price, cost, first) -> None:
    worth = DraftWorth()
    for before, after in seen:
        worth.observe(before, after)
    histogram = worth._after[min(int(free * 6), 5)]
    total = sum(histogram)
    # Ten classes of how sure the best guess will be; below the row's price it will not be used.
    expected = sum(
        max(0.0, reached * (step + 0.5) / 10 - price) * count / total for step, count in enumerate(histogram)
    )
    gain = expected - max(0.0, reached * free - price)
    if abs(gain - cost) < 1e-9:
        return
    assert worth.pays(reached, free, price, cost, first=first) == (gain > cost)
    if first:
        assert worth.gain == pytest.approx(gain, abs=1e-9)
        assert worth.cost == cost


def test_a_model_that_does_not_pay_is_asked_after_waits_that_double_up_to_a_limit() -> None:
    worth, asked = DraftWorth(), []
    for turn in range(1, 2200):
        if worth.pays(1.0, 0.5, 0.1, 5.0, first=True):
            asked.append(turn)
        # Behind the anchor it is never asked against expectation, nor does that count.
        assert not worth.pays(1.0, 0.5, 0.1, 5.0, first=False)
    waits = [later - earlier for earlier, later in zip([0, *asked], asked, strict=False)]
    assert waits == [8, 16, 32, 64, 128, 256, 512, 512, 512]


def test_a_model_that_pays_again_starts_with_the_first_wait() -> None:
    worth = DraftWorth()
    for _ in range(100):
        worth.pays(1.0, 0.0, 0.1, 5.0, first=True)
    assert worth.pays(1.0, 0.0, 0.1, 0.0, first=True)
    assert [worth.pays(1.0, 0.0, 0.1, 5.0, first=True) for _ in range(8)] == [False] * 7 + [True]


def test_what_was_learned_decides() -> None:
    """The same model, price and doubt: asked where it was sure before, not where it was not."""
    good, poor = DraftWorth(), DraftWorth()
    for _ in range(200):
        good.observe(0.1, 0.95)
        poor.observe(0.1, 0.12)
    assert good.pays(1.0, 0.1, 0.2, 0.5, first=False)
    assert not poor.pays(1.0, 0.1, 0.2, 0.5, first=False)
    # Learned of one doubt only.
    assert good.pays(1.0, 0.9, 0.2, 0.5, first=False) == DraftWorth().pays(1.0, 0.9, 0.2, 0.5, first=False)


def test_what_was_learned_fades() -> None:
    worth = DraftWorth()
    for _ in range(5000):
        worth.observe(0.1, 0.95)
    assert worth.pays(1.0, 0.1, 0.2, 0.5, first=False)
    for _ in range(800):
        worth.observe(0.1, 0.12)
    assert not worth.pays(1.0, 0.1, 0.2, 0.3, first=False)
    assert all(sum(bins) <= 401 for bins in worth._after)
    assert worth._weight == pytest.approx([sum(bins) for bins in worth._after])
