"""Format options, and the search of quantization plans: Pareto, Lagrangian relaxation, local search."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun.export.allocation.choices import (
    FormatOption,
    KnapsackProblem,
    LinearChoice,
    Selection,
    cheapest_selection,
    first_selection,
    lagrangian_selection,
    pareto_options,
    plan_of,
    total_cost,
)
from edgerun.export.allocation.local_search import local_search, lower_useless_options
from edgerun.models.manifest import WeightFormat

LINEARS = 5
FORMATS = tuple(WeightFormat(bits, 64) for bits in (2, 4, 8))

Divergence = Callable[[Mapping[str, WeightFormat]], float]


def toy_choices(seed: int, linears: int = LINEARS) -> tuple[LinearChoice, ...]:
    """Linears of random sizes whose divergence falls with their bits."""
    random = np.random.default_rng(seed)
    choices = []
    for index in range(linears):
        size, sensitivity = random.uniform(1, 4), random.exponential()
        options = tuple(
            FormatOption(each, (size * each.bits,), sensitivity / 6 ** (place + 1))
            for place, each in enumerate(FORMATS)
        )
        choices.append(LinearChoice(f"linear {index}", options))
    return tuple(choices)


def toy_problem(seed: int, share: float = 0.4, linears: int = LINEARS) -> KnapsackProblem:
    """Toy choices with a limit that lies by `share` between the costs of the cheapest and the dearest plan."""
    choices = toy_choices(seed, linears)
    cheapest, dearest = (total_cost(choices, (number,) * linears) for number in (0, len(FORMATS) - 1))
    return KnapsackProblem(choices, cheapest + share * (dearest - cheapest))


def toy_divergence(choices: tuple[LinearChoice, ...], seed: int) -> Divergence:
    """A divergence that does not add up: neighbours in few bits make each other worse, or better."""
    interaction = np.random.default_rng(seed + 1).uniform(-0.6, 1.5, len(choices))

    def divergence(plan: Mapping[str, WeightFormat]) -> float:
        each = [_alone(choice, plan) for choice in choices]
        pairs = (more * math.sqrt(one * other) for more, one, other in zip(interaction, each, each[1:], strict=False))
        return sum(each) + sum(pairs)

    return divergence


def smallest_divergence(problem: KnapsackProblem, divergence: Divergence) -> float:
    """The divergence of the best plan that fits, by enumeration."""
    every = product(*(range(len(choice.options)) for choice in problem.choices))
    return min(divergence(plan_of(problem.choices, selection)) for selection in every if problem.fits(selection))


def _alone(choice: LinearChoice, plan: Mapping[str, WeightFormat]) -> float:
    return next(each.divergence for each in choice.options if each.weight_format == plan[choice.linear])


class TestLagrangianSelection:
    @given(st.integers(0, 1000), st.floats(0.01, 1.2))
    def test_fits_and_spends_the_whole_budget(self, seed: int, share: float) -> None:
        problem = toy_problem(seed, share)
        selection = lagrangian_selection(problem)
        assert problem.fits(selection)
        for index, number in enumerate(selection):
            for dearer in range(number + 1, len(FORMATS)):
                assert not problem.fits((*selection[:index], dearer, *selection[index + 1 :]))

    @pytest.mark.parametrize("seed", range(5))
    def test_is_near_the_best_where_divergences_add_up(self, seed: int) -> None:
        problem = toy_problem(seed, linears=7)

        def additive(plan: Mapping[str, WeightFormat]) -> float:
            return sum(_alone(choice, plan) for choice in problem.choices)

        found = additive(plan_of(problem.choices, lagrangian_selection(problem)))
        assert found <= 1.6 * smallest_divergence(problem, additive)

    def test_one_large_linear_may_take_most_of_the_budget(self) -> None:
        """Its dearest option fits with the cheapest of the others, which no single multiplier finds."""
        large = LinearChoice("large", (FormatOption(FORMATS[0], (4.0,), 1.0), FormatOption(FORMATS[2], (10.0,), 0.0)))
        costs = ((1.0, 0.3), (2.0, 0.05), (3.0, 0.0))
        options = tuple(FormatOption(each, (cost,), kl) for each, (cost, kl) in zip(FORMATS, costs, strict=True))
        choices = (large, *(LinearChoice(f"small {index}", options) for index in range(3)))
        problem = KnapsackProblem(choices, 13.0)
        assert lagrangian_selection(problem) == (0, 2, 2, 2)
        assert first_selection(problem) == (1, 0, 0, 0)


class TestLocalSearch:
    @pytest.mark.parametrize("seed", range(4))
    def test_finds_the_best_plan(self, seed: int) -> None:
        problem = toy_problem(seed)
        toy = toy_divergence(problem.choices, seed)
        found = local_search(problem, lagrangian_selection(problem), measured(problem, toy), 60)
        assert problem.fits(found[-1])
        divergences = [toy(plan_of(problem.choices, each)) for each in found]
        assert divergences == sorted(divergences, reverse=True)
        assert divergences[-1] == pytest.approx(smallest_divergence(problem, toy))

    def test_measures_nothing_without_time(self) -> None:
        problem = toy_problem(1)
        start = cheapest_selection(problem)
        assert local_search(problem, start, measured(problem, toy_divergence(problem.choices, 1)), -1) == [start]

    @pytest.mark.parametrize(
        ("alone", "expected"),
        [
            # The gain of a linear alone may vanish when the others are quantized, too.
            (lambda number, bits: number and 1 / bits, (0, *(2,) * (LINEARS - 1))),
            # A checkpoint trained for few bits.
            (lambda number, bits: 0.01 * (bits == 2), (1,) * LINEARS),
        ],
    )
    def test_lowers_options_that_gain_nothing(self, alone, expected: Selection) -> None:
        problem, dearest = KnapsackProblem(toy_choices(2), math.inf), (2,) * LINEARS
        divergence = measured(
            problem, lambda plan: sum(alone(number, each.bits) for number, each in enumerate(plan.values()))
        )
        for start in (dearest, local_search(problem, dearest, divergence, 60)[-1]):
            assert lower_useless_options(problem.choices, start, divergence, divergence) == expected


def measured(problem: KnapsackProblem, divergence: Divergence) -> Callable[[Selection], float]:
    """The divergence of selections."""
    return lambda selection: divergence(plan_of(problem.choices, selection))


@given(
    st.lists(
        st.builds(
            lambda *numbers: FormatOption(
                WeightFormat(4, 32), (float(numbers[0]), float(numbers[1])), float(numbers[2])
            ),
            *(st.integers(0, 4) for _ in range(3)),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_only_pareto_optimal_options_are_kept(offered: list[FormatOption]) -> None:
    kept = pareto_options(offered)
    assert list(kept) == sorted(kept, key=lambda option: option.costs)
    for option in offered:
        at_most = [
            other
            for other in kept
            if other.divergence <= option.divergence
            and all(ours <= theirs for ours, theirs in zip(other.costs, option.costs, strict=True))
        ]
        assert at_most == [option] if option in kept else at_most


@pytest.mark.parametrize("seed", range(6))
def test_a_selection_is_reduced_where_it_loses_least(seed: int) -> None:
    highest = (len(FORMATS) - 1,) * LINEARS
    for share in (0.0, 0.2, 0.5, 0.8, 1.0):
        problem = toy_problem(seed, share * (1 + 1e-12) + 1e-12)
        selection = problem.reduced(highest)
        assert problem.fits(selection)
        for index in range(LINEARS):
            if selection[index] < highest[index]:
                raised = (*selection[:index], selection[index] + 1, *selection[index + 1 :])
                assert total_cost(problem.choices, raised) > total_cost(problem.choices, selection)
    assert toy_problem(seed, 2.0).reduced(highest) == highest
