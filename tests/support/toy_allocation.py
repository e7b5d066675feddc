"""Small allocation problems whose best plan can be found by enumeration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import product

import numpy as np

from edgerun.export.allocation.choices import FormatOption, KnapsackProblem, LinearChoice, plan_of, total_costs
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
    cheapest, dearest = (total_costs(choices, (number,) * linears)[0] for number in (0, len(FORMATS) - 1))
    return KnapsackProblem(choices, (cheapest + share * (dearest - cheapest),))


def additive_divergence(choices: tuple[LinearChoice, ...]) -> Divergence:
    """The sum of the divergences of the linears alone."""

    def divergence(plan: Mapping[str, WeightFormat]) -> float:
        return sum(_alone(choice, plan) for choice in choices)

    return divergence


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
