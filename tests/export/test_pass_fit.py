"""Sums of units' times, fitted to whole passes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun.export.allocation.pass_fit import WholePass, fit_passes

BITS = (2, 4, 8)


def a_pass(layers: int, linears: dict[int, float], factors: dict[int, float], layer: float) -> WholePass:
    """A pass over a model whose units take so much longer in it than by themselves."""
    milliseconds = layers * layer + sum(factors[bits] * each for bits, each in linears.items())
    return WholePass(layers, milliseconds, linears)


def passes(factors: dict[int, float], layer: float, scale: float = 1.0) -> list[WholePass]:
    """Over models of one number of bits each, and of all."""
    uniform = [{bits: scale * (2 + bits)} for bits in BITS]
    return [a_pass(24, linears, factors, layer) for linears in (*uniform, dict.fromkeys(BITS, scale))]


@given(st.floats(-0.02, 0.2), st.floats(0.1, 100))
def test_sums_that_are_right_already_stay(layer: float, scale: float) -> None:
    fit = fit_passes(passes(dict.fromkeys(BITS, 1.0), layer * scale, scale))
    assert fit.factors == pytest.approx(dict.fromkeys(BITS, 1.0))
    assert fit.layer == pytest.approx(layer * scale, abs=1e-9 * scale)


@given(st.lists(st.floats(0.85, 1.15), min_size=3, max_size=3), st.floats(0.01, 0.1))
def test_any_pass_is_near_where_units_take_other_times_together(values: list[float], layer: float) -> None:
    factors = dict(zip(BITS, values, strict=True))
    fit = fit_passes(passes(factors, layer))
    rng = np.random.default_rng(0)
    for _ in range(10):
        linears = dict(zip(BITS, map(float, rng.uniform(0, 4, 3)), strict=True))
        expected = a_pass(24, linears, factors, layer).milliseconds
        assert a_pass(24, linears, dict(fit.factors), fit.layer).milliseconds == pytest.approx(expected, rel=0.03)


def test_a_pass_that_was_disturbed_takes_no_factor_away() -> None:
    good = passes(dict.fromkeys(BITS, 1.0), 0.04)
    slow = WholePass(24, 10 * good[0].milliseconds, good[0].linears)
    fit = fit_passes([slow, *good[1:]])
    assert all(0.5 < factor < 1.5 for factor in fit.factors.values())


def test_one_pass_gives_the_rest() -> None:
    fit = fit_passes([WholePass(2, 5.0, {4: 4.0})])
    assert 2 * fit.layer + 4 * fit.factors[4] == pytest.approx(5.0)
    assert fit.factors[4] == pytest.approx(1.0)


def test_bits_that_no_unit_has_have_no_factor() -> None:
    assert set(fit_passes(passes(dict.fromkeys(BITS, 1.0), 0.1)[:2]).factors) == {2, 4}
