"""Bit allocation: a format for every linear, within a budget, for one model and text.

The number of tokens of a measurement follows from the size of the model: a pass over a small model is cheap, so its
whole text is used; a large model is measured on part of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Final, NamedTuple

from ...errors import InputError
from ...models.atomic import temporary_folder
from ...models.manifest import WeightFormat
from ...models.progress import Progress, silent
from ...models.user_folders import cache_folder
from ...runtime.measure.bundle_timing import BundleTimer
from ..bundle_content import SourceModel
from ..calibration.calibration_text import CalibrationText
from ..calibration.divergence import PlanEvaluator
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import QuantPlan
from ..checkpoint.layout import fused_linears
from ..recipe import ExportRecipe
from .choices import (
    KnapsackProblem,
    LinearChoice,
    PlanDivergence,
    Selection,
    Sensitivity,
    cheapest_selection,
    first_selection,
    lagrangian_selection,
    linear_choices,
    measure_sensitivities,
    plan_of,
    total_costs,
)
from .evolutionary_search import CachedDivergence, SearchSettings, evolve, local_search, lower_useless_options
from .format_candidates import (
    EMBEDDING_LINEAR,
    HEAD_LINEAR,
    completed_plan,
    format_candidates,
    is_allowed,
    planned_linears,
)
from .linear_times import LinearTimes
from .plan_costs import BYTES_READ, Budget, Costs, Measure, file_costs, weight_count
from .quantized_weights import QuantizedLinearStore
from .timing_bundles import TimingBundle

SEARCH_FILE: Final = "search.json"
_LOCAL_SEARCH_SHARE: Final = 0.3
"""Share of the search's time that the local search may take."""
_TIME_TOLERANCE: Final = 0.015
"""Relative difference between the measured and the assumed cost of a plan that is accepted."""
_MAX_CORRECTIONS: Final = 3
_FRONTIER_PLANS: Final = 9
SENSITIVITY_FILE: Final = "sensitivities.json"
SENSITIVITY_WORK: Final = 3e10
"""Weights times tokens of one measurement of a sensitivity: seconds on two cores."""
PLAN_WORK: Final = 5e11
"""Weights times tokens of one measurement of a plan."""
_MIN_TOKENS: Final = 256
_STAGES: Final = (1 / 16, 1 / 4, 1.0)
"""Shares of the text on which plans are measured, one after the other."""
_DEFAULT_SECONDS: Final = 600.0
_TIMED_WIDTHS: Final = (1, 4)
"""Widths of the passes in which an option must not be dominated."""
_ROUNDS: Final = 8
_LOADS: Final = 3
"""Number of times a bundle is loaded: the place of its weights in memory changes a pass by up to a tenth, and
disturbances make it slower, never faster."""


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


class AllocationProblem(NamedTuple):
    """What to allocate, and by which measurements."""

    config: DecoderConfig
    sensitivities: Mapping[str, Sequence[Sensitivity]]
    """Sensitivities of each linear, by its name."""
    stages: Sequence[PlanDivergence]
    """Measure a plan, on increasing parts of the text; the last one on all of it."""
    budget: Budget
    cost_limits: Sequence[CostLimit]
    """Limits of the costs; the first one is the budget's (see `cost_limits`)."""
    measured_ratio: Callable[[QuantPlan], float] | None = None
    """Measures the cost of a plan as a whole, in the measure of the budget, divided by the sum of the costs of its
    parts. Where it is given, the budget limits the cost so measured: it is called with plans near the chosen one, until
    the assumed cost of that one is its measured cost."""


class Allocation(NamedTuple):
    """A chosen quantization plan, and what was measured on the way."""

    plan: QuantPlan
    """Format of every linear of the graph."""
    divergence: float
    """Mean KL in nats on the text that the plan was chosen by."""
    sensitivities: Mapping[str, Sequence[Sensitivity]]
    """Sensitivities of each linear, by its name."""
    history: tuple[tuple[int, float], ...]
    """Generation and best divergence, for every improvement."""
    frontier: tuple[QuantPlan, ...]
    """Plans for other budgets by Lagrangian relaxation, in ascending order of cost."""
    measured_ratio: float = 1.0
    """Measured cost of the plan as a whole divided by the sum over linears; 1 where it was not measured."""


def cost_limits(budget: Budget, config: DecoderConfig, times: Sequence[Costs] = ()) -> list[CostLimit]:
    """The measures of a search, the budget's first.

    Args:
        budget: Budget of the plan.
        config: The model's numbers.
        times: Times of passes. If the budget limits the time, the first one is for its pass. The others have no
            limit, and keep options that are faster without being smaller.
    """
    limit = budget.limit(config)
    if budget.in_file:
        return [CostLimit(file_costs(config), limit), CostLimit(BYTES_READ), *(CostLimit(costs) for costs in times)]
    if budget.measure is not Measure.MILLISECONDS:
        return [CostLimit(BYTES_READ, limit), *(CostLimit(costs) for costs in times)]
    return [CostLimit(times[0], limit), CostLimit(BYTES_READ), *(CostLimit(costs) for costs in times[1:])]


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
    of_linears = [[costs.of(linear, each) for each in formats if is_allowed(linear, each)] for linear in linears]
    cheapest, dearest = (
        cost_limit.measured_ratio * (costs.fixed + sum(map(extreme, of_linears))) for extreme in (min, max)
    )
    if budget.limit(config) < cheapest:
        raise InputError(
            f"no quantization plan of this model is within {budget}",
            f"give a budget from {budget.spelled(cheapest, config)} to {budget.spelled(dearest, config)}",
        )


def allocate(
    problem: AllocationProblem, folder: Path, settings: SearchSettings, progress: Progress = silent
) -> Allocation:
    """Choose a format for every linear within a budget.

    Args:
        problem: What to allocate.
        folder: Keeps the state of the search, so that an interrupted run is resumed.
        settings: Settings of the evolutionary search.
        progress: Receives the stages.

    Raises:
        InputError: No plan is within the budget.
        OSError: The disk refused a write.
    """
    config, budget = problem.config, problem.budget
    leading, *others = problem.cost_limits
    formats = [each.weight_format for known in problem.sensitivities.values() for each in known]
    require_feasible(config, budget, leading, formats)
    costs = [each.costs for each in problem.cost_limits]
    choices = linear_choices(config, problem.sensitivities, costs)
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
        require_feasible(config, budget, leading, formats)
        start = first_selection(knapsack())
    found = evolve(knapsack(), start, divergence, settings, folder / f"{budget}-{SEARCH_FILE}", progress)
    seconds = _LOCAL_SEARCH_SHARE * settings.seconds
    best = local_search(knapsack(), found.parent, divergence, seconds, progress)
    selection = lower_useless_options(choices, best, divergence)
    corrections = 0
    while corrected(selection) and corrections < _MAX_CORRECTIONS:
        corrections += 1
        best = local_search(knapsack(), knapsack().reduced(selection), divergence, seconds, progress)
        selection = lower_useless_options(choices, best, divergence)
    return Allocation(
        plan=completed_plan(config, plan_of(choices, selection)),
        divergence=divergence(selection),
        sensitivities=problem.sensitivities,
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


class PlanSearch:
    """Search of a plan for one model on one text."""

    def __init__(
        self, model: SourceModel, text: CalibrationText, recipe: ExportRecipe, store: QuantizedLinearStore, folder: Path
    ) -> None:
        """Prepare a search; nothing runs yet.

        Args:
            model: The model to export.
            text: The calibration text; plans are measured on its calibration part.
            recipe: The recipe, with mixed weights.
            store: Quantized linears.
            folder: Keeps all measurements.
        """
        self._config = model.config
        self._recipe = recipe
        self._folder = folder
        self._formats = format_candidates(recipe.methods, recipe.zero_points, recipe.half_scales, recipe.low_rank)
        self._evaluator = PlanEvaluator(model, text.calibration, store.weights, folder / "calibration")
        self._all_tokens = sum(map(len, text.calibration))

    def sensitivities(self, progress: Progress) -> dict[str, tuple[Sensitivity, ...]]:
        """Measure every linear in every format that it may take.

        Raises:
            CheckpointError: A tensor cannot be read.
            OSError: The disk refused a write.
        """
        tokens = measured_tokens(self._config, SENSITIVITY_WORK)
        return measure_sensitivities(
            list(planned_linears(self._config)),
            self._formats,
            lambda linear, each: self._evaluator.divergence_alone(linear, each, tokens),
            self._folder / SENSITIVITY_FILE,
            progress,
        )

    def release(self) -> None:
        """Free the memory of the measurements."""
        self._evaluator.release()

    def run(self, budget: Budget, times: LinearTimes, progress: Progress) -> tuple[Allocation, LinearTimes]:
        """Search a plan within a budget.

        Args:
            budget: The budget.
            times: Times of passes on this machine, measured linear by linear.
            progress: Receives the stages.

        Returns:
            The plan, and the times: where whole passes were measured, corrected to the machine's current speed.

        Raises:
            CheckpointError: A tensor cannot be read.
            InputError: No plan is within the budget.
            OSError: The disk refused a write.
        """
        config, recipe = self._config, self._recipe
        timed = budget.measure is Measure.MILLISECONDS
        widths = dict.fromkeys((budget.width, *_TIMED_WIDTHS) if timed else _TIMED_WIDTHS)

        def divergence_on(share: float) -> PlanDivergence:
            tokens = max(_MIN_TOKENS, int(share * min(measured_tokens(config), self._all_tokens)))
            return lambda plan: self._evaluator.divergence(plan, tokens).mean_kl

        limits = cost_limits(budget, config, [times.costs(width) for width in widths])
        require_feasible(config, budget, limits[0], self._formats)
        problem = AllocationProblem(
            config,
            self.sensitivities(progress),
            [divergence_on(share) for share in _STAGES],
            budget,
            limits,
            (lambda plan: measured_over_predicted(times, plan, [budget.width])) if timed else None,
        )
        seconds = _DEFAULT_SECONDS if recipe.time_limit is None else 60 * recipe.time_limit
        found = allocate(problem, self._folder, SearchSettings(seed=recipe.seed, seconds=seconds), progress)
        return found, times.scaled(found.measured_ratio)


def measured_tokens(config: DecoderConfig, work: float = PLAN_WORK) -> int:
    """Number of tokens of a measurement of that many weights times tokens, by default of one of a plan."""
    return max(_MIN_TOKENS, int(work / weight_count(config)))


def measured_over_predicted(times: LinearTimes, plan: QuantPlan, widths: Sequence[int]) -> float:
    """Ratio of the measured time of whole passes to the sum of their linears' times; geometric mean over widths.

    Times of linears are added up as they were measured once. A machine becomes slower when it is hot or busy, and a
    linear's time depends a little on what runs before it. So a model of random weights with the plan is timed as a
    whole.

    Args:
        times: Times of the plan's linears.
        plan: Format of every linear of the graph.
        widths: Widths of the passes.

    Raises:
        BundleError, EdgeError: ONNX Runtime cannot run the model.
        OSError: The disk refused a write.
    """
    # A tied head saves writing a matrix, and takes the same time.
    tied = replace(times.config, tied_head=True)
    formats = {linear.name: plan[linear.name] for linear in fused_linears(tied)} | {EMBEDDING_LINEAR: plan[HEAD_LINEAR]}
    with temporary_folder(cache_folder(), "plan") as folder:
        path = folder / "model"
        TimingBundle(tied, formats).write(path)
        loads = [BundleTimer().time_passes([path], widths, _ROUNDS)[0] for _ in range(_LOADS)]
    least = {width: min(seconds[width] for seconds in loads) for width in widths}
    return geometric_mean(1e3 * least[width] / times.milliseconds(plan, width) for width in widths)
