"""The choice of formats as a multiple-choice knapsack problem.

Each linear takes one of its format options. A selection is a tuple with the index of the option that each linear takes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from ...models.manifest import WeightFormat
from ...models.progress import Progress, silent
from ..checkpoint.config import DecoderConfig
from .format_candidates import planned_linears
from .plan_costs import Costs

Selection = tuple[int, ...]
"""Index of the option that each linear takes."""
PlanDivergence = Callable[[Mapping[str, WeightFormat]], float]
"""Measures the mean KL of a quantization plan, in nats."""
STAGE: Final = "measuring sensitivities"
_BISECTIONS: Final = 100


class FormatOption(NamedTuple):
    """A format that a linear may take."""

    weight_format: WeightFormat
    costs: tuple[float, ...]
    """Cost in each measure of the problem; the first one is the measure of the budget."""
    divergence: float
    """Mean KL in nats with only this linear quantized, in this format."""


class LinearChoice(NamedTuple):
    """A linear and its options, in ascending order of cost in the first measure."""

    linear: str
    options: tuple[FormatOption, ...]


@dataclass(frozen=True)
class KnapsackProblem:
    """Choices whose total cost has a limit."""

    choices: tuple[LinearChoice, ...]
    limit: float
    """Largest total cost in the first measure; the others only decide which options dominate others."""

    def fits(self, selection: Selection) -> bool:
        """Whether the total cost of a selection is within the limit."""
        return total_cost(self.choices, selection) <= self.limit

    def reduced(self, selection: Selection) -> Selection:
        """The selection if it fits, or else a cheaper one of little divergence; `cheapest_selection` must fit."""
        if self.fits(selection):
            return selection
        pairs = zip(self.choices, selection, strict=True)
        cheaper = tuple(choice._replace(options=choice.options[: number + 1]) for choice, number in pairs)
        return lagrangian_selection(replace(self, choices=cheaper))


def linear_choices(
    config: DecoderConfig, sensitivities: Mapping[str, Sequence[Sensitivity]], measures: Sequence[Costs]
) -> tuple[LinearChoice, ...]:
    """The choices of a model, without options that others dominate.

    Args:
        config: The model's numbers.
        sensitivities: Sensitivities of each linear, by its name.
        measures: Measures of cost, the budget's first.
    """
    found = []
    for linear in planned_linears(config):
        options = [
            FormatOption(weight_format, tuple(costs.of(linear, weight_format) for costs in measures), divergence)
            for weight_format, divergence in sensitivities[linear.name]
        ]
        found.append(LinearChoice(linear.name, pareto_options(options)))
    return tuple(found)


def pareto_options(options: Iterable[FormatOption]) -> tuple[FormatOption, ...]:
    """The Pareto-optimal options: no other one costs at most as much in every measure with at most as much KL."""
    kept: list[FormatOption] = []
    for option in sorted(options, key=lambda each: (each.costs, each.divergence)):
        # Sorted by cost, an earlier option is never dearer in the first measure; of equal ones the first is kept.
        if not any(at_most_as_dear(other, option) and other.divergence <= option.divergence for other in kept):
            kept.append(option)
    return tuple(kept)


def at_most_as_dear(one: FormatOption, other: FormatOption) -> bool:
    """Whether an option costs at most as much as another in every measure."""
    return all(cost <= limit for cost, limit in zip(one.costs, other.costs, strict=True))


def total_cost(choices: Sequence[LinearChoice], selection: Selection) -> float:
    """Sum of the costs of the selected options in the first measure."""
    return sum(each.costs[0] for each in selected(choices, selection))


def plan_of(choices: Sequence[LinearChoice], selection: Selection) -> dict[str, WeightFormat]:
    """The selected format of each linear, by its name."""
    options = zip(choices, selected(choices, selection), strict=True)
    return {choice.linear: option.weight_format for choice, option in options}


def selected(choices: Sequence[LinearChoice], selection: Selection) -> list[FormatOption]:
    """The selected option of each linear."""
    return [choice.options[number] for choice, number in zip(choices, selection, strict=True)]


class Sensitivity(NamedTuple):
    """KL of one linear quantized alone, in one format."""

    weight_format: WeightFormat
    divergence: float
    """Mean KL in nats with every other linear in float32."""


def measure_sensitivities(
    measured: Sequence[tuple[str, WeightFormat]],
    divergence_alone: Callable[[str, WeightFormat], float],
    progress: Progress = silent,
) -> dict[str, list[Sensitivity]]:
    """Measure linears in formats.

    Args:
        measured: Pairs of a linear's name and a format.
        divergence_alone: Measures the mean KL in nats with only the named linear quantized.
        progress: Receives the stage "measuring sensitivities".

    Returns:
        The sensitivities of each linear, by its name.
    """
    found = defaultdict[str, list[Sensitivity]](list)
    for number, (linear, weight_format) in enumerate(measured, 1):
        found[linear].append(Sensitivity(weight_format, divergence_alone(linear, weight_format)))
        progress(STAGE, number / len(measured))
    return dict(found)


def cheapest_selection(problem: KnapsackProblem) -> Selection:
    """The selection with the smallest cost."""
    return _at_multiplier(problem, math.inf)


def lagrangian_selection(problem: KnapsackProblem) -> Selection:
    """A selection within the limit with little total divergence; `cheapest_selection` must fit."""
    high, low = 1.0, 0.0
    if problem.fits(_at_multiplier(problem, low)):
        return _at_multiplier(problem, low)
    while not problem.fits(_at_multiplier(problem, high)):
        low, high = high, 4 * high
        if not math.isfinite(high):
            return cheapest_selection(problem)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if problem.fits(_at_multiplier(problem, middle)):
            high = middle
        else:
            low = middle
    return _spend_remainder(problem, _at_multiplier(problem, high))


def first_selection(problem: KnapsackProblem) -> Selection:
    """The best of the Lagrangian selections for each option of the largest linear; `cheapest_selection` must fit."""
    largest = max(range(len(problem.choices)), key=lambda index: problem.choices[index].options[-1].costs[0])
    found = [lagrangian_selection(problem)]
    for number, option in enumerate(problem.choices[largest].options):
        fixed = problem.choices[largest]._replace(options=(option,))
        part = replace(problem, choices=(*problem.choices[:largest], fixed, *problem.choices[largest + 1 :]))
        if part.fits(cheapest_selection(part)):
            selection = lagrangian_selection(part)
            found.append((*selection[:largest], number, *selection[largest + 1 :]))

    def divergence(selection: Selection) -> float:
        return sum(each.divergence for each in selected(problem.choices, selection))

    return min(found, key=divergence)


def _spend_remainder(problem: KnapsackProblem, selection: Selection) -> Selection:
    """Raise one option after another while it fits, the one with the most gain for its cost first."""
    current = list(selection)
    while True:
        best, best_rate = None, 0.0
        for index, choice in enumerate(problem.choices):
            own = choice.options[current[index]]
            for number, option in enumerate(choice.options):
                gain = own.divergence - option.divergence
                rate = gain / max(option.costs[0] / problem.limit - own.costs[0] / problem.limit, 1e-12)
                if gain > 0 and rate > best_rate:
                    trial = (*current[:index], number, *current[index + 1 :])
                    if problem.fits(trial):
                        best, best_rate = (index, number), rate
        if best is None:
            return tuple(current)
        current[best[0]] = best[1]


def _at_multiplier(problem: KnapsackProblem, multiplier: float) -> Selection:
    """The best option of each linear for a Lagrange multiplier of the whole budget; of equal ones the cheaper."""

    def objective(option: FormatOption) -> tuple[float, float]:
        share = option.costs[0] / problem.limit
        if math.isinf(multiplier):
            return share, option.divergence
        return option.divergence + multiplier * share, share

    objectives = [[objective(option) for option in choice.options] for choice in problem.choices]
    return tuple(each.index(min(each)) for each in objectives)
