"""Formats for every unit of a model, chosen by what they cost in quality and in bytes or time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from ...models.manifest import WeightFormat
from ...models.progress import Progress, silent
from ..checkpoint.config import DecoderConfig
from .budget import Budget, Measure, require_reachable
from .choices import Choice, Divergence, Picks, choices_of, lowered, plan_of, total_costs
from .costs import ByteCosts, Costs
from .format_candidates import chosen_linears, may_have, with_embedding
from .lagrange import cheapest, seed_plan
from .polish import polished, without_vain_levels
from .search import Measured, SearchSettings, evolve
from .sensitivity import Solo, solo_divergences

SOLO_FILE: Final = "solo.json"
SEARCH_FILE: Final = "search.json"
_POLISH_SHARE: Final = 0.3
"""Of the time of a search, what its end may take."""
_EXACT: Final = 0.015
"""How far a measured plan may be from what it was taken to cost."""
_CORRECTIONS: Final = 3

Slowness = Callable[[Mapping[str, WeightFormat]], float]
"""What a plan costs when it is measured as a whole, by the sum of what its units cost, in the leading measure."""


class SoloDivergence(Protocol):
    """Measures a unit by itself."""

    def __call__(self, linear: str, form: WeightFormat) -> float:
        """Mean KL in nats with only that unit rounded."""
        ...


@dataclass(frozen=True)
class Limited:
    """A measure in which plans cost something, and how much they may."""

    costs: Costs
    limit: float = math.inf
    """Infinite where the measure only says which levels are spent in vain."""
    slowness: float = 1.0
    """What a plan costs, measured as a whole, by the sum of what its parts cost."""

    @property
    def room(self) -> float:
        """What the units may cost together."""
        return self.limit / self.slowness - self.costs.fixed


@dataclass(frozen=True)
class Allocation:
    """What a search chose."""

    plan: Mapping[str, WeightFormat]
    """Format by unit, for every unit of the graph."""
    divergence: float
    """Mean KL in nats on the text it was chosen by."""
    costs: tuple[float, ...]
    """In each measure, as the sum of what units cost."""
    solos: Mapping[str, Sequence[Solo]]
    """What each format does to each unit by itself."""
    history: tuple[tuple[int, float], ...]
    """Generation and best divergence, whenever it fell."""
    seeds: tuple[Mapping[str, WeightFormat], ...]
    """Plans for other budgets, chosen as if divergences added up: from the cheapest to the dearest."""
    slowness: float = 1.0
    """What the plan costs in the leading measure, measured as a whole, by that sum; 1 where it was not measured."""


def measures_for(budget: Budget, config: DecoderConfig, times: Sequence[Costs] = ()) -> list[Limited]:
    """The measures of a search, that of the budget first.

    Args:
        budget: what is limited.
        config: the model's numbers.
        times: milliseconds of passes; that of the budget's rows is among them, and first, if it limits time. No level
            of a plan is spent in vain in those that are given.
    """
    limit = budget.limit(config)
    if budget.measure is not Measure.MILLISECONDS:
        return [Limited(ByteCosts(), limit), *(Limited(costs) for costs in times)]
    return [Limited(times[0], limit), Limited(ByteCosts()), *(Limited(costs) for costs in times[1:])]


def require_affordable(config: DecoderConfig, budget: Budget, measure: Limited, forms: Sequence[WeightFormat]) -> None:
    """Check that some plan keeps to a budget.

    Args:
        config: the model's numbers.
        budget: for the message; its limit is that of the measure.
        measure: what is limited.
        forms: that units may have.

    Raises:
        InputError: none does.
    """
    costs, linears = measure.costs, list(chosen_linears(config))
    least, most = (
        measure.slowness
        * (
            costs.fixed
            + sum(pick(costs.of(linear, form) for form in forms if may_have(linear, form)) for linear in linears)
        )
        for pick in (min, max)
    )
    require_reachable(budget, config, least, most)


def allocate(
    config: DecoderConfig,
    solo: SoloDivergence,
    stages: Sequence[Divergence],
    budget: Budget,
    measures: Sequence[Limited],
    forms: Sequence[WeightFormat],
    *,
    folder: Path,
    settings: SearchSettings,
    progress: Progress = silent,
    slowness: Slowness | None = None,
) -> Allocation:
    """Choose a format for every unit within a budget.

    Args:
        config: the model's numbers.
        solo: measures one unit.
        stages: measure a plan, from little text to all of it.
        budget: for messages; its limit is that of the first measure.
        measures: see `measures_for`.
        forms: that units may have.
        folder: keeps what has been found out, so that an interrupted run goes on from there.
        settings: how long to search.
        progress: hears what is being done.
        slowness: measures a plan as a whole; where it is given, the budget limits what that gives. It is asked of
            plans near the one that is chosen, until what that one is taken to cost is what it does cost.

    Raises:
        InputError: no plan keeps to the budget.
        OSError: the disk refused a write.
    """
    linears = list(chosen_linears(config))
    costs = [measure.costs for measure in measures]
    leading, *others = measures
    require_affordable(config, budget, leading, forms)
    solos = solo_divergences(linears, forms, solo, folder / SOLO_FILE, progress)
    choices = choices_of(config, solos, costs)
    measured = Measured(choices, stages)

    def limits() -> list[float]:
        return [each.room for each in (leading, *others)]

    def mistaken(picks: Picks) -> bool:
        """Whether a plan costs something else than was thought; from then on it is taken to cost what it does."""
        nonlocal leading
        if slowness is None:
            return False
        before = leading.slowness
        leading = replace(leading, slowness=slowness(with_embedding(config, plan_of(choices, picks))))
        return abs(leading.slowness / before - 1) > _EXACT

    start = seed_plan(choices, limits())
    if mistaken(start):
        require_affordable(config, budget, leading, forms)
        start = seed_plan(choices, limits())
    found = evolve(choices, start, limits(), measured, settings, folder / f"{budget}-{SEARCH_FILE}", progress)
    seconds = _POLISH_SHARE * settings.seconds
    best = polished(choices, found.picks, limits(), measured, seconds, progress)
    picks = without_vain_levels(choices, best, measured)
    corrections = 0
    while mistaken(picks) and corrections < _CORRECTIONS:
        corrections += 1
        best = polished(choices, lowered(choices, picks, limits()), limits(), measured, seconds, progress)
        picks = without_vain_levels(choices, best, measured)
    return Allocation(
        with_embedding(config, plan_of(choices, picks)),
        measured(picks),
        tuple(spent + each.fixed for spent, each in zip(total_costs(choices, picks), costs, strict=True)),
        solos,
        (*found.history, (found.history[-1][0] + 1, measured(picks))),
        _seeds(config, choices),
        leading.slowness,
    )


_SEEDS: Final = 9


def _seeds(config: DecoderConfig, choices: Sequence[Choice]) -> tuple[Mapping[str, WeightFormat], ...]:
    """Plans along the way from the cheapest to the dearest, by the leading measure alone."""
    free = [math.inf] * (len(choices[0].levels[0].costs) - 1)
    least = total_costs(choices, cheapest(choices, [1.0, *free]))[0]
    most = sum(choice.levels[-1].costs[0] for choice in choices)
    limits = [least * (most / least) ** (step / (_SEEDS - 1)) for step in range(_SEEDS)]
    return tuple(with_embedding(config, plan_of(choices, seed_plan(choices, [limit, *free]))) for limit in limits)
