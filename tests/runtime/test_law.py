from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from edgerun.runtime.distribution import Distribution

V = 12


@st.composite
def laws(draw: st.DrawFn) -> Distribution:
    weights = np.array(draw(st.lists(st.integers(0, 5), min_size=V, max_size=V).filter(any)), np.float64)
    # A law may name tokens of no probability.
    ids = np.flatnonzero((weights > 0) | np.array(draw(st.lists(st.booleans(), min_size=V, max_size=V))))
    return Distribution(ids, weights[ids] / weights.sum())


def dense(law: Distribution) -> npt.NDArray[np.float64]:
    values = np.zeros(V)
    values[law.ids] = law.probs
    return values


@given(p=laws(), q=laws(), scale=st.sampled_from([1.0, 0.5, 0.0]))
def test_excess_and_residual_are_those_of_dense_laws(p: Distribution, q: Distribution, scale: float) -> None:
    left = np.maximum(0, scale * dense(p) - dense(q))
    np.testing.assert_allclose(p.excess(q, scale), left[p.ids], atol=1e-15)
    if left.sum() > 1e-12:
        np.testing.assert_allclose(dense(p.residual(q, scale)), left / left.sum(), atol=1e-12)
    assert dense(p.residual(q, scale)).sum() > 1 - 1e-12


@given(law=laws(), token=st.integers(0, V - 1))
def test_without_a_token_the_others_share_its_part(law: Distribution, token: int) -> None:
    expected = dense(law)
    assert law.probability(token) == expected[token]
    expected[token] = 0
    left = law.without(token)
    if expected.any():
        np.testing.assert_allclose(dense(left), expected / expected.sum(), atol=1e-15)
    else:
        assert left.ids.size == 0


@given(law=laws(), uniform=st.floats(0, 1, exclude_max=True))
def test_a_draw_is_the_inverse_of_the_cumulative_law(law: Distribution, uniform: float) -> None:
    values = dense(law)
    token = law.draw(uniform)
    assert values[token] > 0
    assert values[:token].sum() <= uniform + 1e-12
    assert uniform <= values[: token + 1].sum() + 1e-12


def test_a_draw_at_the_very_top_has_some_probability() -> None:
    law = Distribution(np.arange(4), np.array([0.1, 0.2, 0.7, 0.0]))
    assert law.draw(float(np.nextafter(1, 0))) == 2
    assert law.draw(1.0) == 2


def test_where_rounding_leaves_nothing_the_law_itself_remains() -> None:
    law = Distribution(np.arange(3), np.array([0.1, 0.2, 0.7]))
    assert law.residual(law) is law
    assert law.residual(Distribution(law.ids, law.probs + 1e-17)) is law
