"""Search of quantization plans: Lagrangian relaxation, evolutionary search, local search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun.export.allocation.choices import (
    FormatOption,
    KnapsackProblem,
    LinearChoice,
    cheapest_selection,
    first_selection,
    lagrangian_selection,
    plan_of,
)
from edgerun.export.allocation.evolutionary_search import (
    CachedDivergence,
    SearchSettings,
    evolve,
    local_search,
    lower_useless_options,
)
from edgerun.models.manifest import WeightFormat
from support.toy_allocation import (
    FORMATS,
    LINEARS,
    additive_divergence,
    smallest_divergence,
    toy_choices,
    toy_divergence,
    toy_problem,
)

QUICK = SearchSettings(generations=60, patience=15, offspring=12, survivors=(4,))


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
        divergence = additive_divergence(problem.choices)
        found = divergence(plan_of(problem.choices, lagrangian_selection(problem)))
        assert found <= 1.6 * smallest_divergence(problem, divergence)

    def test_one_large_linear_may_take_most_of_the_budget(self) -> None:
        """Its dearest option fits with the cheapest of the others, which no single multiplier finds."""
        large = LinearChoice("large", (FormatOption(FORMATS[0], (4.0,), 1.0), FormatOption(FORMATS[2], (10.0,), 0.0)))
        costs = ((1.0, 0.3), (2.0, 0.05), (3.0, 0.0))
        options = tuple(FormatOption(each, (cost,), kl) for each, (cost, kl) in zip(FORMATS, costs, strict=True))
        choices = (large, *(LinearChoice(f"small {index}", options) for index in range(3)))
        problem = KnapsackProblem(choices, (13.0,))
        assert lagrangian_selection(problem) == (0, 2, 2, 2)
        assert first_selection(problem) == (1, 0, 0, 0)

    def test_keeps_several_limits(self) -> None:
        """An option that is cheap in bytes may be dear in time."""
        fast, small = FormatOption(FORMATS[1], (4.0, 1.0), 0.5), FormatOption(FORMATS[0], (2.0, 3.0), 0.4)
        choices = tuple(LinearChoice(f"linear {index}", (small, fast)) for index in range(2))
        assert lagrangian_selection(KnapsackProblem(choices, (8.0, 2.5))) == (1, 1)
        assert lagrangian_selection(KnapsackProblem(choices, (8.0, math.inf))) == (0, 0)
        assert cheapest_selection(KnapsackProblem(choices, (math.inf, 2.5))) == (1, 1)


class TestEvolutionarySearch:
    @pytest.mark.parametrize("seed", range(4))
    def test_finds_the_best_plan(self, tmp_path: Path, seed: int) -> None:
        problem = toy_problem(seed)
        toy = toy_divergence(problem.choices, seed)
        divergence = CachedDivergence(problem.choices, [toy, toy])
        found = evolve(problem, lagrangian_selection(problem), divergence, QUICK, tmp_path / "search.json")
        selection = local_search(problem, found.parent, divergence, 60)
        assert problem.fits(selection)
        assert divergence(selection) == pytest.approx(smallest_divergence(problem, toy))

    def test_resumes_after_an_interruption(self, tmp_path: Path) -> None:
        problem = toy_problem(3, linears=9)
        toy, start = toy_divergence(problem.choices, 3), cheapest_selection(problem)
        whole = evolve(problem, start, CachedDivergence(problem.choices, [toy]), QUICK, tmp_path / "whole.json")
        left = 40

        def failing(plan: Mapping[str, WeightFormat]) -> float:
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            return toy(plan)

        parts = tmp_path / "parts.json"
        with pytest.raises(KeyboardInterrupt):
            evolve(problem, start, CachedDivergence(problem.choices, [failing]), QUICK, parts)
        assert parts.is_file()
        assert evolve(problem, start, CachedDivergence(problem.choices, [toy]), QUICK, parts) == whole

    @pytest.mark.parametrize("damage", [b"", b"{}", b'{"plan": {"linear 0": "int3/64"}}', b"\xff"])
    def test_ignores_a_damaged_state(self, tmp_path: Path, damage: bytes) -> None:
        problem = toy_problem(0)
        divergence = CachedDivergence(problem.choices, [toy_divergence(problem.choices, 0)])
        state = tmp_path / "search.json"
        sound = evolve(problem, lagrangian_selection(problem), divergence, QUICK, state)
        state.write_bytes(damage)
        assert evolve(problem, lagrangian_selection(problem), divergence, QUICK, state) == sound

    def test_ends_after_its_time(self, tmp_path: Path) -> None:
        problem, ticks = toy_problem(1), iter(range(1000))
        divergence = CachedDivergence(problem.choices, [toy_divergence(problem.choices, 1)])
        short = replace(QUICK, seconds=3, patience=100, clock=lambda: float(next(ticks)))
        evolve(problem, cheapest_selection(problem), divergence, short, tmp_path / "search.json")
        assert next(ticks) < 8

    def test_reduces_a_state_that_no_longer_fits(self, tmp_path: Path) -> None:
        roomy, narrow = (toy_problem(3, share, linears=9) for share in (0.6, 0.3))
        divergence = CachedDivergence(roomy.choices, [toy_divergence(roomy.choices, 3)])
        state = tmp_path / "search.json"
        whole = evolve(roomy, lagrangian_selection(roomy), divergence, QUICK, state)
        no_generation = replace(QUICK, generations=0)
        found = evolve(narrow, cheapest_selection(narrow), divergence, no_generation, state)
        assert narrow.fits(found.parent)
        assert not narrow.fits(whole.parent)
        assert found.parent == narrow.reduced(whole.parent)
        assert found.divergence == divergence(found.parent)


class TestLocalSearch:
    def test_lowers_an_option_that_gains_nothing(self) -> None:
        """The gain of a linear alone may vanish when the others are quantized, too."""
        problem = KnapsackProblem(toy_choices(2), (math.inf,))

        def without_first(plan: Mapping[str, WeightFormat]) -> float:
            return sum(1 / each.bits for linear, each in plan.items() if linear != problem.choices[0].linear)

        divergence = CachedDivergence(problem.choices, [without_first])
        selection = local_search(problem, (2,) * LINEARS, divergence, 60)
        assert selection == (0, *(2,) * (LINEARS - 1))
        assert lower_useless_options(problem.choices, (2,) * LINEARS, divergence) == selection

    def test_takes_the_cheapest_of_formats_without_loss(self, tmp_path: Path) -> None:
        """A checkpoint trained for few bits: there is nothing to search for."""
        problem, calls = KnapsackProblem(toy_choices(2), (math.inf,)), 0

        def lossless_from_4_bits(plan: Mapping[str, WeightFormat]) -> float:
            nonlocal calls
            calls += 1
            return sum(0.0 if each.bits > 2 else 0.01 for each in plan.values())

        divergence = CachedDivergence(problem.choices, [lossless_from_4_bits])
        dearest = (len(FORMATS) - 1,) * LINEARS
        found = evolve(problem, dearest, divergence, QUICK, tmp_path / "search.json")
        assert (found.parent, found.divergence, calls) == (dearest, 0, 1)
        improved = local_search(problem, dearest, divergence, 60)
        selection = lower_useless_options(problem.choices, improved, divergence)
        assert selection == (FORMATS.index(WeightFormat(4, 64)),) * LINEARS
