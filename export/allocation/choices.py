"""The choice of formats as a multiple-choice knapsack problem.

Each linear takes one of its format options. A selection is a tuple with the index of the option that each linear takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...models.manifest import WeightFormat
from ..checkpoint.config import DecoderConfig
from .format_candidates import planned_linears
from .plan_costs import Costs
from .sensitivity import Sensitivity

Selection = tuple[int, ...]
"""Index of the option that each linear takes."""
PlanDivergence = Callable[[Mapping[str, WeightFormat]], float]
"""Measures the mean KL of a quantization plan, in nats."""


@dataclass(frozen=True)
class FormatOption:
    """A format that a linear may take."""

    weight_format: WeightFormat
    costs: tuple[float, ...]
    """Cost in each measure of the problem; the first one is the measure of the budget."""
    divergence: float
    """Mean KL in nats with only this linear quantized, in this format."""


@dataclass(frozen=True)
class LinearChoice:
    """A linear and its options, in ascending order of cost in the first measure."""

    linear: str
    options: tuple[FormatOption, ...]


@dataclass(frozen=True)
class KnapsackProblem:
    """Choices whose total costs have limits."""

    choices: tuple[LinearChoice, ...]
    limits: tuple[float, ...]
    """Largest total cost in each measure; infinite for a measure without a limit."""

    def fits(self, selection: Selection) -> bool:
        """Whether the total costs of a selection are within the limits."""
        costs = total_costs(self.choices, selection)
        return all(cost <= limit for cost, limit in zip(costs, self.limits, strict=True))

    def reduced(self, selection: Selection) -> Selection:
        """Lower options until the selection fits, each time the one that loses least KL per cost that it frees.

        The first option of every choice must fit.
        """
        current = list(selection)
        while not self.fits(tuple(current)):
            losses = []
            for index, number in enumerate(current):
                if number > 0:
                    lower, own = self.choices[index].options[number - 1], self.choices[index].options[number]
                    freed = max(own.costs[0] - lower.costs[0], 1e-12)
                    losses.append(((lower.divergence - own.divergence) / freed, index))
            if not losses:
                break
            current[min(losses)[1]] -= 1
        return tuple(current)


def linear_choices(
    config: DecoderConfig, sensitivities: Mapping[str, Sequence[Sensitivity]], measures: Sequence[Costs]
) -> tuple[LinearChoice, ...]:
    """The choices of a model, without options that others dominate.

    Args:
        config: The model's numbers.
        sensitivities: Sensitivities of each linear, by its name.
        measures: Measures of cost, that of the budget first.
    """
    found = []
    for linear in planned_linears(config):
        options = [
            FormatOption(weight_format, tuple(costs.of(linear, weight_format) for costs in measures), divergence)
            for weight_format, divergence in sensitivities[linear.name]
        ]
        found.append(LinearChoice(linear.name, pareto_options(without_dominated_corrections(options))))
    return tuple(found)


def without_dominated_corrections(options: Sequence[FormatOption]) -> list[FormatOption]:
    """Remove the options with a low-rank correction that do not beat those without one at equal cost.

    An option with a correction has to lie below the line between any two options without one. Of two linears that are
    equally sensitive, one may take the dearer option and the other the cheaper one, which costs as much as both taking
    an option halfway between, and has the divergence that the line gives.
    """
    plain = sorted((each.costs[0], each.divergence) for each in options if not each.weight_format.rank)
    return [each for each in options if not each.weight_format.rank or not _dominated(each, plain)]


def _dominated(option: FormatOption, plain: Sequence[tuple[float, float]]) -> bool:
    """Whether an option is no better than a plain one that costs at most as much, or than the line between two."""
    cost, divergence = option.costs[0], option.divergence
    cheaper = [each for each in plain if each[0] <= cost]
    if any(known <= divergence for _, known in cheaper):
        return True
    dearer = [each for each in plain if each[0] > cost]
    shares = ((one, other, (cost - one[0]) / (other[0] - one[0])) for one in cheaper for other in dearer)
    return any(one[1] + share * (other[1] - one[1]) <= divergence for one, other, share in shares)


def pareto_options(options: Iterable[FormatOption]) -> tuple[FormatOption, ...]:
    """The Pareto-optimal options: no other one costs at most as much in every measure with at most as much KL."""
    kept: list[FormatOption] = []
    for option in sorted(options, key=lambda each: (each.costs, each.divergence)):
        # Sorted by cost, an earlier option is never dearer in the first measure; of equal ones the first is kept.
        if not any(_dominates(other, option) for other in kept):
            kept.append(option)
    return tuple(kept)


def _dominates(one: FormatOption, other: FormatOption) -> bool:
    return at_most_as_dear(one, other) and one.divergence <= other.divergence


def at_most_as_dear(one: FormatOption, other: FormatOption) -> bool:
    """Whether an option costs at most as much as another in every measure."""
    return all(cost <= limit for cost, limit in zip(one.costs, other.costs, strict=True))


def total_costs(choices: Sequence[LinearChoice], selection: Selection) -> tuple[float, ...]:
    """Sum of the costs of the selected options, in each measure."""
    each = (choice.options[number].costs for choice, number in zip(choices, selection, strict=True))
    return tuple(map(sum, zip(*each, strict=True)))


def plan_of(choices: Sequence[LinearChoice], selection: Selection) -> dict[str, WeightFormat]:
    """The selected format of each linear, by its name."""
    return {
        choice.linear: choice.options[number].weight_format for choice, number in zip(choices, selection, strict=True)
    }
