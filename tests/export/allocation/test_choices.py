"""Format options: Pareto-optimal ones, low-rank corrections, selections that fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun.export.allocation.choices import (
    FormatOption,
    Sensitivity,
    linear_choices,
    pareto_options,
    total_costs,
    without_dominated_corrections,
)
from edgerun.export.allocation.format_candidates import BASE_FORMATS, LOW_RANK_FORMATS, planned_linears
from edgerun.export.allocation.plan_costs import BYTES_READ
from edgerun.export.checkpoint.config import read_config
from edgerun.models.manifest import WeightFormat
from support.tiny_models import write_checkpoint
from support.toy_allocation import FORMATS, LINEARS, toy_problem

PLAIN = (FormatOption(WeightFormat(2, 64), (10.0,), 1.0), FormatOption(WeightFormat(4, 64), (20.0,), 0.2))


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


@pytest.mark.parametrize(
    ("cost", "divergence", "wins"),
    [
        (15.0, 0.61, False),
        (15.0, 0.59, True),
        (10.0, 1.0, False),
        (9.0, 1.5, True),
        (20.0, 0.2, False),
        (25.0, 0.2, False),
        (25.0, 0.1, True),
    ],
)
def test_corrections_have_to_win_at_equal_cost(cost: float, divergence: float, wins: bool) -> None:
    option = FormatOption(WeightFormat(2, 64, rank=32), (cost,), divergence)
    assert (option in without_dominated_corrections([*PLAIN, option])) is wins
    assert without_dominated_corrections(PLAIN) == list(PLAIN)


def test_choices_have_only_corrections_that_win(tmp_path: Path) -> None:
    config = read_config(write_checkpoint(tmp_path / "tiny", "qwen2", hidden_size=96))

    def sensitivities(kl: float) -> list[Sensitivity]:
        found = {"int2/64": 1.0, "int8/32": 0.0, "int2/64+rank16": kl}
        return [
            Sensitivity(each, found[str(each)]) for each in (*BASE_FORMATS, *LOW_RANK_FORMATS) if str(each) in found
        ]

    for kl, kept in ((0.001, 3), (0.9, 2)):
        known = {linear.name: sensitivities(kl) for linear in planned_linears(config)}
        choices = linear_choices(config, known, [BYTES_READ])
        assert len({choice.linear: choice for choice in choices}["layers.0.gate_up"].options) == kept


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
                costs = total_costs(problem.choices, raised)[0], total_costs(problem.choices, selection)[0]
                assert costs[0] > costs[1]
    assert toy_problem(seed, 2.0).reduced(highest) == highest
