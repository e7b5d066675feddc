"""A mix for decoding with guesses keeps to the budget, diverges no more, and is expected to be faster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from edgerun.export import WeightFormat
from edgerun.export.allocation.allocate import Allocation, Limited
from edgerun.export.allocation.costs import ByteCosts, cost_of
from edgerun.export.allocation.format_candidates import chosen_linears, with_embedding
from edgerun.export.allocation.linear_times import LinearTimes, kind_of
from edgerun.export.allocation.sensitivity import Solo
from edgerun.export.allocation.speculation import DraftSpeed, with_draft
from edgerun.export.checkpoint.config import read_config
from edgerun.export.faster_mix import faster_with_guesses
from edgerun.export.progress import silent
from support.tiny_models import write_checkpoint

TWO, FOUR, EIGHT = WeightFormat(2, 64), WeightFormat(4, 64), WeightFormat(8, 64)
LOSS = {TWO: 1.0, FOUR: 0.1, EIGHT: 0.01}
TIMES = {TWO: {1: 1.0, 4: 4.0}, FOUR: {1: 1.5, 4: 3.6}, EIGHT: {1: 2.5, 4: 2.8}}
"""A row more costs least with 8 bits."""


@pytest.mark.parametrize("roomy", [True, False])
def test_the_budget_holds_and_the_plan_is_no_worse(roomy: bool, tmp_path: Path) -> None:
    config = read_config(write_checkpoint(tmp_path))
    linears = [linear.name for linear in chosen_linears(config)]
    times = LinearTimes(
        config, {(kind_of(linear), form): each for linear in linears for form, each in TIMES.items()}, {1: 0.5, 4: 0.5}
    )

    def divergence(plan: Mapping[str, WeightFormat]) -> float:
        return sum(LOSS[plan[linear]] for linear in linears)

    four = with_embedding(config, dict.fromkeys(linears, FOUR))
    eight = with_embedding(config, dict.fromkeys(linears, EIGHT))
    costs = ByteCosts()
    limited = Limited(costs, cost_of(eight if roomy else four, costs, config))
    solos = {linear: tuple(Solo(form, loss) for form, loss in LOSS.items()) for linear in linears}
    plain = Allocation(four, divergence(four), (), solos, (), ())
    draft = DraftSpeed(0.9, 0.1)
    found = faster_with_guesses(plain, limited, divergence, times, draft, silent)
    plan = found.allocation.plan
    assert cost_of(plan, costs, config) <= limited.limit
    assert divergence(plan) <= plain.divergence
    assert found.rate == with_draft(times, plan, draft).tokens_per_second
    assert found.plain_rate == with_draft(times, four, draft).tokens_per_second
    assert (found.rate > found.plain_rate) == roomy
    assert (plan == four) == (not roomy)
