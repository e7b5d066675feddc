"""Bit allocation: a format for every linear, within a budget, for one model and text.

The number of tokens of a measurement follows from the size of the model: a pass over a small model is cheap, so its
whole text is used; a large model is measured on part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from statistics import geometric_mean
from typing import Final, NamedTuple

from ...errors import InputError
from ...models.atomic import temporary_folder
from ...models.manifest import WeightFormat
from ...models.progress import Progress, silent
from ...models.user_folders import cache_folder
from ...runtime.measure.bundle_timing import BundleTimer
from ..calibration.divergence import PlanEvaluator
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import QuantPlan
from ..checkpoint.layout import fused_linears
from ..quantization.codes import kernel_bits
from ..quantization.option_values import DeviceChoice
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
    total_cost,
)
from .format_candidates import (
    EMBEDDING_LINEAR,
    HEAD_LINEAR,
    allowed_formats,
    completed_plan,
    format_candidates,
    is_allowed,
    planned_linears,
)
from .linear_times import LinearTimes
from .local_search import SelectionDivergence, local_search, lower_useless_options
from .plan_costs import BYTES_READ, Budget, Costs, Measure, file_costs, weight_count
from .timing_bundles import TimingBundle

DEFAULT_SECONDS: Final = 600.0
"""Time limit of a search."""
_CORRECTION_SHARE: Final = 0.3
"""Share of that time that a further search may take after a correction."""
_TIME_TOLERANCE: Final = 0.015
"""Relative difference between the measured and the assumed cost of a plan that is accepted."""
_MAX_CORRECTIONS: Final = 3
_FRONTIER_PLANS: Final = 9
SENSITIVITY_WORK: Final = 3e10
"""Weights times tokens of one measurement of a sensitivity: seconds on two cores."""
PLAN_WORK: Final = 5e11
"""Weights times tokens of one measurement of a plan."""
_MIN_TOKENS: Final = 256
_SCREENED_SHARE: Final = 1 / 4
"""Share of the text on which options that may gain nothing are compared first."""
_FILE_FORMATS_PAY: Final = 0.9
"""Largest ratio of the KL with formats that save bytes in the file alone to that without, for which they are taken."""
_TIMED_WIDTHS: Final = (1, 4)
"""Widths of the passes in which an option must not be dominated."""
_ROUNDS: Final = 8
_LOADS: Final = 3
"""Number of times a bundle is loaded: the place of its weights in memory changes a pass by up to a tenth, and
disturbances make it slower, never faster."""


class Allocation(NamedTuple):
    """A chosen quantization plan, and what was measured on the way."""

    plan: QuantPlan
    """Format of every linear of the graph."""
    divergence: float
    """Mean KL in nats on the text that the plan was chosen by."""
    sensitivities: Mapping[str, Sequence[Sensitivity]]
    """Sensitivities of each linear, by its name."""
    frontier: tuple[QuantPlan, ...]
    """Plans for other budgets by Lagrangian relaxation, in ascending order of cost."""
    measured_ratio: float = 1.0
    """Measured cost of the plan as a whole divided by the sum over linears; 1 where it was not measured."""


def cost_measures(budget: Budget, config: DecoderConfig, times: Sequence[Costs] = ()) -> list[Costs]:
    """The measures of a search, the budget's first; the others keep options that are cheaper in them.

    Args:
        budget: Budget of the plan.
        config: The model's numbers.
        times: Times of passes; if the budget limits the time, the first one is for its pass.
    """
    if budget.in_file:
        return [file_costs(config), BYTES_READ, *times]
    if budget.measure is not Measure.MILLISECONDS:
        return [BYTES_READ, *times]
    return [times[0], BYTES_READ, *times[1:]]


def require_feasible(
    config: DecoderConfig, budget: Budget, costs: Costs, formats: Sequence[WeightFormat], measured_ratio: float = 1.0
) -> None:
    """Check that some plan is within a budget.

    Args:
        config: The model's numbers.
        budget: The budget.
        costs: Costs in its measure.
        formats: Format candidates.
        measured_ratio: Cost of a plan measured as a whole, divided by the sum of the costs of its parts.

    Raises:
        InputError: Even the cheapest plan exceeds the budget.
    """
    linears = list(planned_linears(config))
    of_linears = [[costs.of(linear, each) for each in formats if is_allowed(linear, each)] for linear in linears]
    cheapest, dearest = (measured_ratio * (costs.fixed + sum(map(extreme, of_linears))) for extreme in (min, max))
    if budget.limit(config) < cheapest:
        raise InputError(
            f"no quantization plan of this model is within {budget}",
            f"give a budget from {budget.spelled(cheapest, config)} to {budget.spelled(dearest, config)}",
        )


def allocate(
    config: DecoderConfig,
    sensitivities: Mapping[str, Sequence[Sensitivity]],
    divergences: tuple[PlanDivergence, PlanDivergence],
    budget: Budget,
    costs: Sequence[Costs],
    measured_ratio: Callable[[QuantPlan], float] | None = None,
    seconds: float = DEFAULT_SECONDS,
    progress: Progress = silent,
) -> Allocation:
    """Choose a format for every linear within a budget.

    Args:
        config: The model's numbers.
        sensitivities: Sensitivities of each linear, by its name.
        divergences: Measure a plan on a part of the text, and on all of it.
        budget: The budget.
        costs: Measures of cost, the budget's first (see `cost_measures`).
        measured_ratio: Measures the cost of a plan as a whole, divided by the sum of the costs of its parts. If it is
            given, the budget limits the cost so measured.
        seconds: Time limit of the search.
        progress: Receives the stage "searching".

    Raises:
        InputError: No plan is within the budget.
        OSError: The disk refused a write.
    """
    formats = [each.weight_format for known in sensitivities.values() for each in known]
    require_feasible(config, budget, costs[0], formats)
    choices, ratio = linear_choices(config, sensitivities, costs), 1.0

    def once(measure: PlanDivergence) -> SelectionDivergence:
        return cache(lambda selection: measure(plan_of(choices, selection)))

    screen, divergence = map(once, divergences)

    def knapsack() -> KnapsackProblem:
        return KnapsackProblem(choices, budget.limit(config) / ratio - costs[0].fixed)

    def corrected(selection: Selection) -> bool:
        """Measure the cost of a plan as a whole; whether it differs from the assumed cost."""
        nonlocal ratio
        if measured_ratio is None:
            return False
        assumed, ratio = ratio, measured_ratio(completed_plan(config, plan_of(choices, selection)))
        return abs(ratio / assumed - 1) > _TIME_TOLERANCE

    selection = first_selection(knapsack())
    if corrected(selection):
        require_feasible(config, budget, costs[0], formats, ratio)
        selection = first_selection(knapsack())
    for share in (1.0, *(_CORRECTION_SHARE,) * _MAX_CORRECTIONS):
        problem = knapsack()
        found = local_search(problem, problem.reduced(selection), divergence, share * seconds, progress)
        selection = lower_useless_options(choices, found[-1], divergence, screen)
        if not corrected(selection):
            break
    plan = completed_plan(config, plan_of(choices, selection))
    return Allocation(plan, divergence(selection), sensitivities, frontier_plans(config, choices), ratio)


def frontier_plans(config: DecoderConfig, choices: tuple[LinearChoice, ...]) -> tuple[QuantPlan, ...]:
    """Plans by Lagrangian relaxation, from the cheapest to the dearest."""
    cheapest = total_cost(choices, cheapest_selection(KnapsackProblem(choices, 1.0)))
    dearest = sum(choice.options[-1].costs[0] for choice in choices)
    limits = [cheapest * (dearest / cheapest) ** (step / (_FRONTIER_PLANS - 1)) for step in range(_FRONTIER_PLANS)]
    problems = (KnapsackProblem(choices, limit) for limit in limits)
    return tuple(completed_plan(config, plan_of(choices, lagrangian_selection(each))) for each in problems)


def formats_of(recipe: ExportRecipe) -> tuple[WeightFormat, ...]:
    """The format candidates of a recipe with mixed weights."""
    budget = recipe.parsed_budget
    in_file = budget is not None and budget.in_file and recipe.device != DeviceChoice.NPU
    return format_candidates(recipe.methods, recipe.zero_points, recipe.half_scales, in_file)


def plan_sensitivities(
    config: DecoderConfig, recipe: ExportRecipe, evaluator: PlanEvaluator, progress: Progress
) -> dict[str, list[Sensitivity]]:
    """Measure every linear in every format that a recipe allows it.

    Raises:
        CheckpointError: A tensor cannot be read.
        OSError: The disk refused a write.
    """
    tokens = measured_tokens(config, SENSITIVITY_WORK)
    alone = partial(evaluator.divergence_alone, tokens=tokens)
    return measure_sensitivities(allowed_formats(config, formats_of(recipe)), alone, progress)


def search_plan(
    config: DecoderConfig,
    recipe: ExportRecipe,
    budget: Budget,
    evaluator: PlanEvaluator,
    times: LinearTimes,
    progress: Progress,
) -> tuple[Allocation, LinearTimes]:
    """Search a plan within a budget.

    Args:
        config: The model's numbers.
        recipe: The recipe, with mixed weights.
        budget: The budget.
        evaluator: Measures plans on the calibration part of the text.
        times: Times of passes on this machine, measured linear by linear.
        progress: Receives the stages.

    Returns:
        The plan, and the times: where whole passes were measured, corrected to the machine's current speed.

    Raises:
        CheckpointError: A tensor cannot be read.
        InputError: No plan is within the budget.
        OSError: The disk refused a write.
    """
    timed = budget.measure is Measure.MILLISECONDS
    widths = dict.fromkeys((budget.width, *_TIMED_WIDTHS) if timed else _TIMED_WIDTHS)

    def divergence_on(share: float) -> PlanDivergence:
        tokens = max(_MIN_TOKENS, int(share * min(measured_tokens(config), evaluator.tokens)))
        return lambda plan: evaluator.mean_kl(plan, tokens)

    costs = cost_measures(budget, config, [times.costs(width) for width in widths])
    require_feasible(config, budget, costs[0], formats_of(recipe))
    sensitivities = plan_sensitivities(config, recipe, evaluator, progress)
    found = allocate(
        config,
        _with_file_formats_that_pay(config, sensitivities, divergence_on(1.0), budget, costs),
        (divergence_on(_SCREENED_SHARE), divergence_on(1.0)),
        budget,
        costs,
        (lambda plan: measured_over_predicted(times, plan, [budget.width])) if timed else None,
        DEFAULT_SECONDS if recipe.time_limit is None else 60 * recipe.time_limit,
        progress,
    )
    return found, replace(times, slowdown=found.measured_ratio)


def _with_file_formats_that_pay(
    config: DecoderConfig,
    sensitivities: dict[str, list[Sensitivity]],
    divergence: PlanDivergence,
    budget: Budget,
    costs: Sequence[Costs],
) -> dict[str, list[Sensitivity]]:
    """Sensitivities without formats that save bytes in the file alone, unless the KL is considerably less with these.

    A pass reads such matrices as 4 or 8 bits, so it takes longer than with formats that have their bits throughout.
    """
    others = {
        name: [each for each in known if each.weight_format.bits == kernel_bits(each.weight_format.bits)]
        for name, known in sensitivities.items()
    }
    if others == sensitivities:
        return sensitivities

    def first(known: Mapping[str, Sequence[Sensitivity]]) -> float:
        choices = linear_choices(config, known, costs)
        problem = KnapsackProblem(choices, budget.limit(config) - costs[0].fixed)
        return divergence(plan_of(choices, first_selection(problem)))

    return sensitivities if first(sensitivities) < _FILE_FORMATS_PAY * first(others) else others


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
