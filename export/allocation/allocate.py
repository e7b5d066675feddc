"""Bit allocation: a format for every linear, within a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ...models.manifest import WeightFormat
from ...models.progress import Progress, silent
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import QuantPlan
from .budget import Budget, Measure, require_reachable
from .choices import KnapsackProblem, LinearChoice, PlanDivergence, Selection, linear_choices, plan_of, total_costs
from .evolutionary_search import CachedDivergence, SearchSettings, evolve
from .format_candidates import completed_plan, is_allowed, planned_linears
from .lagrange import cheapest_selection, first_selection, lagrangian_selection
from .local_search import local_search, lower_useless_options
from .plan_costs import ByteCosts, Costs, FileCosts
from .sensitivity import Sensitivity, measure_sensitivities

SENSITIVITY_FILE: Final = "sensitivities.json"
SEARCH_FILE: Final = "search.json"
_LOCAL_SEARCH_SHARE: Final = 0.3
"""Share of the search's time that the local search may take."""
_TIME_TOLERANCE: Final = 0.015
"""Relative difference between the measured and the assumed cost of a plan that is accepted."""
_MAX_CORRECTIONS: Final = 3
_FRONTIER_PLANS: Final = 9


@dataclass(frozen=True)
class CostLimit:
    """A measure of cost, and the largest cost that a plan may have in it."""

    costs: Costs
    limit: float = math.inf
    """Infinite where the measure only decides which options dominate others."""
    measured_ratio: float = 1.0
    """Cost of a plan measured as a whole, divided by the sum of the costs of its parts."""

    @property
    def linear_limit(self) -> float:
        """Largest total cost of the linears."""
        return self.limit / self.measured_ratio - self.costs.fixed


@dataclass(frozen=True)
class AllocationProblem:
    """What to allocate, and by which measurements."""

    config: DecoderConfig
    divergence_alone: Callable[[str, WeightFormat], float]
    """Measures the mean KL in nats with only the named linear quantized."""
    stages: Sequence[PlanDivergence]
    """Measure a plan, on increasing parts of the text; the last one on all of it."""
    budget: Budget
    cost_limits: Sequence[CostLimit]
    """Limits of the costs; the first one is the budget's (see `cost_limits`)."""
    formats: Sequence[WeightFormat]
    """Format candidates."""
    measured_ratio: Callable[[QuantPlan], float] | None = None
    """Measures the cost of a plan as a whole, in the measure of the budget, divided by the sum of the costs of its
    parts. Where it is given, the budget limits the cost so measured: it is called with plans near the chosen one, until
    the assumed cost of that one is its measured cost."""


@dataclass(frozen=True)
class Allocation:
    """A chosen quantization plan, and what was measured on the way."""

    plan: QuantPlan
    """Format of every linear of the graph."""
    divergence: float
    """Mean KL in nats on the text that the plan was chosen by."""
    costs: tuple[float, ...]
    """Cost in each measure, as the sum over linears."""
    sensitivities: Mapping[str, Sequence[Sensitivity]]
    """Sensitivities of each linear, by its name."""
    history: tuple[tuple[int, float], ...]
    """Generation and best divergence, for every improvement."""
    frontier: tuple[QuantPlan, ...]
    """Plans for other budgets by Lagrangian relaxation, in ascending order of cost."""
    measured_ratio: float = 1.0
    """Measured cost of the plan as a whole divided by the sum over linears; 1 where it was not measured."""


def cost_limits(budget: Budget, config: DecoderConfig, times: Sequence[Costs] = ()) -> list[CostLimit]:
    """The measures of a search, that of the budget first.

    Args:
        budget: Budget of the plan.
        config: The model's numbers.
        times: Times of passes. If the budget limits the time, the first one is that of its pass. The others have no
            limit, and keep options that are faster without being smaller.
    """
    limit = budget.limit(config)
    if budget.in_file:
        return [CostLimit(FileCosts(config), limit), CostLimit(ByteCosts()), *(CostLimit(costs) for costs in times)]
    if budget.measure is not Measure.MILLISECONDS:
        return [CostLimit(ByteCosts(), limit), *(CostLimit(costs) for costs in times)]
    return [CostLimit(times[0], limit), CostLimit(ByteCosts()), *(CostLimit(costs) for costs in times[1:])]


def require_feasible(
    config: DecoderConfig, budget: Budget, cost_limit: CostLimit, formats: Sequence[WeightFormat]
) -> None:
    """Check that some plan is within a budget.

    Args:
        config: The model's numbers.
        budget: The budget, for the message.
        cost_limit: The budget's measure and limit.
        formats: Format candidates.

    Raises:
        InputError: Even the cheapest plan exceeds the budget.
    """
    costs, linears = cost_limit.costs, list(planned_linears(config))
    cheapest, dearest = (
        cost_limit.measured_ratio
        * (
            costs.fixed
            + sum(extreme(costs.of(linear, each) for each in formats if is_allowed(linear, each)) for linear in linears)
        )
        for extreme in (min, max)
    )
    require_reachable(budget, config, cheapest, dearest)


def allocate(
    problem: AllocationProblem, folder: Path, settings: SearchSettings, progress: Progress = silent
) -> Allocation:
    """Choose a format for every linear within a budget.

    Args:
        problem: What to allocate.
        folder: Keeps all measurements, so that an interrupted run is resumed.
        settings: Settings of the evolutionary search.
        progress: Receives the stages.

    Raises:
        InputError: No plan is within the budget.
        OSError: The disk refused a write.
    """
    config, budget = problem.config, problem.budget
    leading, *others = problem.cost_limits
    require_feasible(config, budget, leading, problem.formats)
    file = folder / SENSITIVITY_FILE
    linears = list(planned_linears(config))
    sensitivities = measure_sensitivities(linears, problem.formats, problem.divergence_alone, file, progress)
    costs = [each.costs for each in problem.cost_limits]
    choices = linear_choices(config, sensitivities, costs)
    divergence = CachedDivergence(choices, problem.stages)

    def knapsack() -> KnapsackProblem:
        return KnapsackProblem(choices, tuple(each.linear_limit for each in (leading, *others)))

    def corrected(selection: Selection) -> bool:
        """Measure a plan as a whole; whether its cost differs from the assumed one, which is then replaced."""
        nonlocal leading
        if problem.measured_ratio is None:
            return False
        assumed = leading.measured_ratio
        measured = problem.measured_ratio(completed_plan(config, plan_of(choices, selection)))
        leading = replace(leading, measured_ratio=measured)
        return abs(measured / assumed - 1) > _TIME_TOLERANCE

    start = first_selection(knapsack())
    if corrected(start):
        require_feasible(config, budget, leading, problem.formats)
        start = first_selection(knapsack())
    found = evolve(knapsack(), start, divergence, settings, folder / f"{budget}-{SEARCH_FILE}", progress)
    seconds = _LOCAL_SEARCH_SHARE * settings.seconds
    best = local_search(knapsack(), found.selection, divergence, seconds, progress)
    selection = lower_useless_options(choices, best, divergence)
    corrections = 0
    while corrected(selection) and corrections < _MAX_CORRECTIONS:
        corrections += 1
        best = local_search(knapsack(), knapsack().reduced(selection), divergence, seconds, progress)
        selection = lower_useless_options(choices, best, divergence)
    return Allocation(
        plan=completed_plan(config, plan_of(choices, selection)),
        divergence=divergence(selection),
        costs=tuple(spent + each.fixed for spent, each in zip(total_costs(choices, selection), costs, strict=True)),
        sensitivities=sensitivities,
        history=(*found.history, (found.history[-1][0] + 1, divergence(selection))),
        frontier=frontier_plans(config, choices),
        measured_ratio=leading.measured_ratio,
    )


def frontier_plans(config: DecoderConfig, choices: tuple[LinearChoice, ...]) -> tuple[QuantPlan, ...]:
    """Plans by Lagrangian relaxation, from the cheapest to the dearest, limited in the first measure alone."""
    unlimited = (math.inf,) * (len(choices[0].options[0].costs) - 1)
    cheapest = total_costs(choices, cheapest_selection(KnapsackProblem(choices, (1.0, *unlimited))))[0]
    dearest = sum(choice.options[-1].costs[0] for choice in choices)
    limits = [cheapest * (dearest / cheapest) ** (step / (_FRONTIER_PLANS - 1)) for step in range(_FRONTIER_PLANS)]
    problems = (KnapsackProblem(choices, (limit, *unlimited)) for limit in limits)
    return tuple(completed_plan(config, plan_of(choices, lagrangian_selection(each))) for each in problems)
