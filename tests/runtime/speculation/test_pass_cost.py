"""Pass cost t(m): how estimates follow the machine's speed, measuring it, and storing it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.session import SessionConfig
from edgerun.runtime.speculation.growth import best_width
from edgerun.runtime.speculation.pass_cost import (
    BUCKET_ENDS,
    MAX_OBSERVED_WIDTH,
    TOLERANCE,
    Doubt,
    PassCost,
    is_plausible,
)

TIMES = {1: 8.1e-3, 2: 10.7e-3, 3: 14.9e-3, 4: 18.0e-3, 6: 24.7e-3, 8: 31.3e-3}
CONFIG = SessionConfig(choose_device("cpu"), 1)

seconds = st.floats(1e-6, 10)
contexts = st.sampled_from((0, 512, 513, 2048, 5000, 40_000, 10**6))
tables = st.dictionaries(
    st.sampled_from((0, 600, 3000, 9000, 10**6)),
    st.dictionaries(st.integers(2, 40), seconds, max_size=6).flatmap(
        lambda others: seconds.map(lambda one: {1: one, **others})
    ),
    min_size=1,
)
passes = st.lists(st.tuples(st.integers(1, MAX_OBSERVED_WIDTH), contexts, st.floats(1e-7, 100)), max_size=60)


def ratios(cost: PassCost, context: int = 0) -> np.ndarray:
    curve = cost.curve(context, 8)
    return curve / curve[0]


@given(tables, passes, contexts, st.integers(1, 64))
def test_curves_are_positive_and_never_fall(
    table: dict[int, dict[int, float]], seen: list[tuple[int, int, float]], context: int, max_width: int
) -> None:
    cost = PassCost(table)
    for width, where, took in seen:
        cost.observe(width, where, took)
    curve = cost.curve(context, max_width)
    assert curve.shape == (max_width,)
    assert curve.dtype == np.float64
    assert np.isfinite(curve).all()
    assert (curve > 0).all()
    assert (np.diff(curve) >= -1e-12 * curve[:-1]).all()
    assert cost.seconds(max_width, context) == curve[-1]
    assert cost.observed == len(seen)


@given(tables, passes, contexts)
def test_json_keeps_the_curves(table: dict[int, dict[int, float]], seen: list[tuple[int, int, float]], at: int) -> None:
    cost = PassCost(table)
    for width, where, took in seen:
        cost.observe(width, where, took)
    again = PassCost.from_json(json.loads(json.dumps(cost.to_json())))
    assert again.measured.keys() == cost.measured.keys()
    for end, times in cost.measured.items():
        assert again.measured[end] == pytest.approx(times)
    # Passes in a bucket too few to be kept, and how much each estimate is trusted, are not carried over.
    if not seen:
        np.testing.assert_allclose(again.curve(at, 30), cost.curve(at, 30))


def test_measured_widths_are_kept_and_those_between_are_interpolated() -> None:
    cost = PassCost({100: TIMES})
    for width, took in TIMES.items():
        assert cost.seconds(width, 0) == pytest.approx(took)
    assert cost.seconds(5, 0) == pytest.approx((18.0e-3 + 24.7e-3) / 2)
    slope = (31.3e-3 - 18.0e-3) / 4
    assert cost.seconds(40, 0) == pytest.approx(31.3e-3 + 32 * slope)
    assert cost.curve(0, 3).base is not None
    with pytest.raises(ValueError, match="read-only"):
        cost.curve(0, 3)[0] = 1


def test_one_width_costs_as_many_passes_and_falling_measurements_are_levelled() -> None:
    np.testing.assert_allclose(PassCost({0: {1: 0.5}}).curve(0, 4), [0.5, 1, 1.5, 2])
    np.testing.assert_allclose(PassCost({0: {1: 1.0, 2: 3.0, 3: 2.0, 4: 4.0}}).curve(0, 4), [1, 2.5, 2.5, 4])


@given(st.integers(1, 8), st.floats(1e-4, 1e4), st.integers(0, 40))
def test_one_disturbed_pass_changes_almost_nothing(width: int, factor: float, before: int) -> None:
    cost = PassCost({0: TIMES})
    for number in range(before):
        width = number % 8 + 1
        cost.observe(width, 0, cost.seconds(width, 0))
    cost.observe(width, 0, cost.seconds(width, 0) * factor)
    for number in range(20):
        width = number % 8 + 1
        cost.observe(width, 0, PassCost({0: TIMES}).seconds(width, 0))
    np.testing.assert_allclose(cost.curve(0, 8), PassCost({0: TIMES}).curve(0, 8), rtol=0.05)


@given(st.floats(0.2, 5), st.lists(st.integers(1, 8), min_size=30, max_size=80))
def test_a_change_of_speed_keeps_the_ratios(factor: float, widths: list[int]) -> None:
    cost, true = PassCost({0: TIMES}), PassCost({0: TIMES})
    for width in widths:
        cost.observe(width, 0, true.seconds(width, 0) * factor)
    np.testing.assert_allclose(ratios(cost), ratios(true), rtol=1e-6)
    # Curves follow at once, and exactly, unless the speed moved by less than decides anything.
    followed = factor if abs(math.log(factor)) > TOLERANCE else 1.0
    np.testing.assert_allclose(cost.curve(0, 8), true.curve(0, 8) * followed, rtol=1e-6)
    # Another context, never run at the new speed, is slower by the same factor.
    assert cost.seconds(1, 3000) == pytest.approx(true.seconds(1, 3000) * followed, rel=1e-6)


def test_a_wrong_shape_is_learnt_from_noisy_passes() -> None:
    flat = dict.fromkeys(TIMES, 0.0081)
    cost, true = PassCost({0: flat}), PassCost({0: TIMES})
    random = np.random.default_rng(0)
    for _ in range(3000):
        width = int(random.choice([1, 2, 4, 8]))
        disturbed = 5.0 if random.random() < 0.05 else 1.0
        cost.observe(width, 0, true.seconds(width, 0) * disturbed * float(random.lognormal(0, 0.04)))
    measured = cost.measured[BUCKET_ENDS[0]]
    for width in (2, 4, 8):
        assert measured[width] / measured[1] == pytest.approx(TIMES[width] / TIMES[1], rel=0.05)


@pytest.mark.parametrize("doubt", [None, Doubt.OUTDATED])
def test_passes_elsewhere_do_not_move_the_estimates(doubt: Doubt | None) -> None:
    """Thousands of passes at long contexts, a little disturbed, leave the costs at short contexts as they were."""
    rng = np.random.default_rng(0)
    cost = PassCost({256: TIMES}, doubt)
    for context, number in ((256, 300), (1024, 6000), (3000, 6000)):
        widths = rng.choice(list(TIMES), number, p=(0.6, 0.16, 0.1, 0.06, 0.05, 0.03))
        disturbances = np.exp(np.abs(rng.normal(0, 0.04, number)))
        for width, disturbance in zip(widths.tolist(), disturbances.tolist(), strict=True):
            cost.observe(width, context, TIMES[width] * (1 + context / 6000) * disturbance)
    for context in (256, 1024, 3000):
        expected = [TIMES[width] * (1 + context / 6000) for width in TIMES]
        assert [cost.seconds(width, context) for width in TIMES] == pytest.approx(expected, rel=0.12)


def test_a_longer_context_inherits_the_shape_and_learns_its_level() -> None:
    cost = PassCost({0: TIMES})
    assert cost.seconds(4, 5000) == pytest.approx(TIMES[4])
    for _ in range(30):
        cost.observe(1, 5000, 3 * TIMES[1])
    np.testing.assert_allclose(cost.curve(5000, 8), 3 * cost.curve(0, 8), rtol=0.01)
    assert cost.seconds(1, 0) == pytest.approx(TIMES[1], rel=0.01)
    assert set(cost.measured) == {512, 8192}
    assert cost.seconds(1, 10**6) == pytest.approx(3 * TIMES[1], rel=0.01)


@pytest.mark.parametrize(
    ("width", "took"), [(0, 1.0), (MAX_OBSERVED_WIDTH + 1, 1.0), (1, 0.0), (1, -1.0), (1, math.nan)]
)
def test_invalid_widths_and_times_are_not_observed(width: int, took: float) -> None:
    cost = PassCost({0: TIMES})
    cost.observe(width, 0, took)
    assert cost.observed == 0


@pytest.mark.parametrize(
    "table",
    [{}, {0: {}}, {0: {2: 1.0}}, {0: {1: 0.0}}, {0: {1: math.inf}}, {0: {0: 1.0, 1: 1.0}}, {0: {1: 1.0}, 9: {1: 1.0}}],
)
def test_invalid_measurements_are_refused(table: dict[int, dict[int, float]]) -> None:
    with pytest.raises(ValueError, match=r"measure|s for"):
        PassCost(table)


BUSY_TIMES = {1: 3.1e-3, 2: 129e-3, 3: 20e-3, 4: 150e-3, 6: 60e-3, 8: 400e-3}
"""What a busy machine measured of a model whose passes take `TIMES`."""


def run(cost: PassCost, widths: list[int], times: dict[int, float], disturbed: float = 0.0) -> None:
    """Observe passes that take these times, some of them ten times as long."""
    random = np.random.default_rng(1)
    for width in widths:
        cost.observe(width, 0, times[width] * (10.0 if random.random() < disturbed else 1.0))


@pytest.mark.parametrize("disturbed", [0.0, 0.15, 0.4])
def test_doubtful_costs_are_right_after_few_passes(disturbed: float) -> None:
    cost = PassCost({0: BUSY_TIMES}, Doubt.BUSY)
    run(cost, [1, 1, 2, 1, 4] * 12, TIMES, disturbed)
    for width in (1, 2, 4):
        assert cost.seconds(width, 0) == pytest.approx(TIMES[width], rel=0.15)
    believed = PassCost({0: BUSY_TIMES})
    run(believed, [1, 1, 2, 1, 4] * 12, TIMES, disturbed)
    assert believed.seconds(2, 0) > 3 * TIMES[2], "costs that nothing is known against change slowly"


def test_passes_of_one_width_do_not_move_it_against_the_others() -> None:
    cost = PassCost({0: TIMES}, Doubt.BUSY)
    random = np.random.default_rng(3)
    for number in range(120):
        slow = 9.0 if number < 10 or random.random() < 0.3 else 1.0
        cost.observe(1, 0, TIMES[1] * slow)
    np.testing.assert_allclose(ratios(cost), ratios(PassCost({0: TIMES})), rtol=1e-6)


def test_doubtful_costs_do_not_keep_passes_from_being_run() -> None:
    curve = PassCost({0: BUSY_TIMES}, Doubt.BUSY).curve(0, 8)
    assert (curve <= 2 * np.arange(1, 9) * curve[0]).all()
    slow_start = PassCost({0: {**TIMES, 1: 0.5}}, Doubt.BUSY)
    assert slow_start.seconds(1, 0) == pytest.approx(TIMES[2]), "a narrower pass takes no longer"


def test_a_doubt_and_the_number_of_measurements_are_kept() -> None:
    again = PassCost.from_json(json.loads(json.dumps(PassCost({0: TIMES}, Doubt.OUTDATED, 3).to_json())))
    assert (again.doubt, again.measurements) == (Doubt.OUTDATED, 3)
    assert again.measured == {512: pytest.approx(TIMES)}
    for changed in ({"doubt": "other"}, {"measurements": 0}, {"measurements": "1"}):
        with pytest.raises(ValueError, match="other|measurements"):
            PassCost.from_json({**PassCost({0: TIMES}).to_json(), **changed})


@pytest.mark.parametrize(
    ("times", "plausible"),
    [
        (TIMES, True),
        (dict.fromkeys(TIMES, 0.01), True),
        ({1: 1.0, 2: 3.9, 16: 31.0}, True),
        ({1: 3.1e-3, 2: 129e-3}, False),
        ({1: 1.0, 2: 0.4}, False),
        ({1: 1.0, 4: 6.0, 8: 2.9}, False),
    ],
)
def test_plausible_costs(times: dict[int, float], plausible: bool) -> None:
    assert is_plausible(times) is plausible


def test_passes_contradict_a_cost_that_was_measured_wrongly() -> None:
    wrong = {**TIMES, 2: 3 * TIMES[2]}
    cost = PassCost({0: wrong})
    run(cost, [1, 1, 2] * 20, TIMES)
    assert cost.is_contradicted
    cost.distrust()
    assert (cost.doubt, cost.is_contradicted) == (Doubt.OUTDATED, False)
    run(cost, [1, 1, 2] * 10, TIMES)
    assert cost.seconds(2, 0) == pytest.approx(TIMES[2], rel=0.1)
    assert PassCost.from_json(cost.to_json()).doubt is Doubt.OUTDATED


def test_a_noisy_machine_does_not_contradict_the_costs() -> None:
    cost = PassCost({0: TIMES})
    random = np.random.default_rng(2)
    for _ in range(400):
        width = int(random.choice([1, 2, 4, 8]))
        slow = 1.4 if random.random() < 0.5 else 1.0
        cost.observe(width, 0, TIMES[width] * slow * float(random.lognormal(0, 0.1)))
    assert not cost.is_contradicted


def test_passes_of_fixed_widths_cost_stairs() -> None:
    cost = PassCost({256: {1: 1.0, 4: 1.5, 12: 4.0}}, stairs=True)
    assert cost.curve(0, 26).tolist() == pytest.approx(
        [1.0, *[1.5] * 3, *[4.0] * 8, 5.0, *[5.5] * 3, *[8.0] * 8, 9, 9.5]
    )
    assert (cost.stairs, cost.max_width) == ((1, 4, 12), 12)
    for _ in range(40):
        cost.observe(1, 0, 1.0)
        cost.observe(3, 0, 2.0)  # the graph of width 4
        cost.observe(13, 0, 100.0)  # no pass has that many
    assert list(cost.measured[512]) == [1, 4, 12]
    assert cost.curve(0, 4).tolist() == pytest.approx([1.0, *[2.0] * 3], rel=0.05)
    again = PassCost.from_json(json.loads(json.dumps(cost.to_json())))
    assert again.stairs == cost.stairs
    assert again.curve(0, 30).tolist() == pytest.approx(cost.curve(0, 30).tolist())
    assert PassCost({256: {1: 1.0, 4: 1.5}}).stairs is None
    with pytest.raises(ValueError, match="passes have the widths"):
        PassCost({256: {1: 1.0, 4: 1.5}, 1000: {1: 1.0}}, stairs=True)


def test_drafts_fill_the_width_that_pays_and_are_never_wider() -> None:
    probabilities = [0.5, 0.3, 0.2, 0.2, 0.2, 0.2, 0.2]
    cost = PassCost({256: {1: 1.0, 4: 1.5, 8: 4.0}}, stairs=True)
    assert best_width(probabilities, cost.curve(0, 8).tolist(), 1.0, 8)[0] == 4
    dear = PassCost({256: {1: 1.0, 4: 2.5, 8: 4.0}}, stairs=True)
    assert best_width(probabilities, dear.curve(0, 8).tolist(), 1.0, 8)[0] == 1
