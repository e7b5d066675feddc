"""A first plan by Lagrangian relaxation, as if the units' divergences added up (reference: Everett, 1963).

For a price of the budget, each unit takes the level of least divergence plus price times cost, by itself. The price is
found by bisection, so that the plan just fits; what is left over is spent on the levels that gain most for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from .choices import Choice, Level, Picks, fits

_BISECTIONS: Final = 100


def cheapest(choices: Sequence[Choice], limits: Sequence[float]) -> Picks:
    """The plan that leaves most of every limit."""
    return _at_price(choices, limits, math.inf)


def seed_plan(choices: Sequence[Choice], limits: Sequence[float]) -> Picks:
    """A plan within the limits with little divergence, as the sum over units has it.

    Args:
        choices: the units.
        limits: of each measure, infinite where it has none; `cheapest` fits them.
    """
    dear, free = 1.0, 0.0
    if fits(choices, _at_price(choices, limits, free), limits):
        return _at_price(choices, limits, free)
    while not fits(choices, _at_price(choices, limits, dear), limits):
        free, dear = dear, 4 * dear
        if not math.isfinite(dear):
            return cheapest(choices, limits)
    for _ in range(_BISECTIONS):
        middle = (free + dear) / 2
        if fits(choices, _at_price(choices, limits, middle), limits):
            dear = middle
        else:
            free = middle
    return filled(choices, _at_price(choices, limits, dear), limits)


def filled(choices: Sequence[Choice], picks: Picks, limits: Sequence[float]) -> Picks:
    """The plan with what is left over spent, on one level after another, that of most gain for its cost first."""
    current = list(picks)
    while True:
        best, gain_of_best = None, 0.0
        for index, choice in enumerate(choices):
            own = choice.levels[current[index]]
            for pick, level in enumerate(choice.levels):
                gain = own.divergence - level.divergence
                rate = gain / max(_share(level, limits) - _share(own, limits), 1e-12)
                if gain > 0 and rate > gain_of_best:
                    trial = (*current[:index], pick, *current[index + 1 :])
                    if fits(choices, trial, limits):
                        best, gain_of_best = (index, pick), rate
        if best is None:
            return tuple(current)
        current[best[0]] = best[1]


def _at_price(choices: Sequence[Choice], limits: Sequence[float], price: float) -> Picks:
    """The best level of each unit at a price of the whole budget; of equals the cheaper one."""

    def best(levels: Sequence[Level]) -> int:
        return min(range(len(levels)), key=lambda pick: paid(levels[pick]))

    def paid(level: Level) -> tuple[float, float]:
        share = _share(level, limits)
        return (share, level.divergence) if math.isinf(price) else (level.divergence + price * share, share)

    return tuple(best(choice.levels) for choice in choices)


def _share(level: Level, limits: Sequence[float]) -> float:
    """Which part of the limits a level takes, over all measures that have one."""
    return sum(cost / limit for cost, limit in zip(level.costs, limits, strict=True) if math.isfinite(limit))
