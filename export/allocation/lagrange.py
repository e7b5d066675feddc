"""A first selection of formats by Lagrangian relaxation (Everett, 1963).

The divergences of linears are assumed to add up. For a given Lagrange multiplier each linear independently takes the
option with the least divergence plus multiplier times cost. Bisection finds the smallest multiplier whose selection
fits the limits; the rest of the limits is spent greedily.

No multiplier spends the limits well where one linear is a large part of the model, as the LM head of a small model is:
its options are far apart in cost. `first_selection` therefore tries each option of the largest linear.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from .choices import FormatOption, KnapsackProblem, Selection

_BISECTIONS: Final = 100


def cheapest_selection(problem: KnapsackProblem) -> Selection:
    """The selection that takes the smallest share of the limits."""
    return _at_multiplier(problem, math.inf)


def lagrangian_selection(problem: KnapsackProblem) -> Selection:
    """A selection within the limits with little total divergence; `cheapest_selection` must fit."""
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
        fixed = replace(problem.choices[largest], options=(option,))
        part = replace(problem, choices=(*problem.choices[:largest], fixed, *problem.choices[largest + 1 :]))
        if part.fits(cheapest_selection(part)):
            selection = lagrangian_selection(part)
            found.append((*selection[:largest], number, *selection[largest + 1 :]))

    def divergence(selection: Selection) -> float:
        chosen = zip(problem.choices, selection, strict=True)
        return sum(choice.options[number].divergence for choice, number in chosen)

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
                rate = gain / max(_limit_share(option, problem.limits) - _limit_share(own, problem.limits), 1e-12)
                if gain > 0 and rate > best_rate:
                    trial = (*current[:index], number, *current[index + 1 :])
                    if problem.fits(trial):
                        best, best_rate = (index, number), rate
        if best is None:
            return tuple(current)
        current[best[0]] = best[1]


def _at_multiplier(problem: KnapsackProblem, multiplier: float) -> Selection:
    """The best option of each linear for a Lagrange multiplier of the whole budget; of equal ones the cheaper."""

    def best(options: Sequence[FormatOption]) -> int:
        return min(range(len(options)), key=lambda number: objective(options[number]))

    def objective(option: FormatOption) -> tuple[float, float]:
        share = _limit_share(option, problem.limits)
        if math.isinf(multiplier):
            return share, option.divergence
        return option.divergence + multiplier * share, share

    return tuple(best(choice.options) for choice in problem.choices)


def _limit_share(option: FormatOption, limits: Sequence[float]) -> float:
    """Share of the limits that an option takes, summed over all measures that have one."""
    return sum(cost / limit for cost, limit in zip(option.costs, limits, strict=True) if math.isfinite(limit))
