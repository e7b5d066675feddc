"""What there is to choose: for each unit the levels that are worth their cost.

A plan in the making is a tuple with, for each unit, the number of its level (`Picks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...models.manifest import WeightFormat
from ..checkpoint.config import DecoderConfig
from .costs import Costs
from .format_candidates import chosen_linears
from .sensitivity import Solo

Picks = tuple[int, ...]
"""The number of the level of each choice."""
Divergence = Callable[[Mapping[str, WeightFormat]], float]
"""Mean KL in nats of a plan for the chosen units."""


@dataclass(frozen=True)
class Level:
    """A format that a unit may have."""

    form: WeightFormat
    costs: tuple[float, ...]
    """In each measure that a budget limits or that is not to be spent in vain; the first is the leading one."""
    divergence: float
    """Mean KL in nats with this unit alone in this format."""


@dataclass(frozen=True)
class Choice:
    """A unit and its levels, from the cheapest in the leading measure upwards."""

    linear: str
    levels: tuple[Level, ...]


def choices_of(
    config: DecoderConfig,
    solos: Mapping[str, Sequence[Solo]],
    measures: Sequence[Costs],
) -> tuple[Choice, ...]:
    """The choices of a model; levels that others make pointless are left out.

    Args:
        config: the model's numbers.
        solos: what each format does to each unit by itself.
        measures: in which levels cost something.
    """
    found = []
    for linear in chosen_linears(config):
        levels = [
            Level(form, tuple(costs.of(linear, form) for costs in measures), divergence)
            for form, divergence in solos[linear.name]
        ]
        found.append(Choice(linear.name, worthwhile(without_beaten_repairs(levels))))
    return tuple(found)


def without_beaten_repairs(levels: Sequence[Level]) -> list[Level]:
    """The levels, of those with a rank such as win at equal cost, in the leading measure.

    They have to lie below the line between any two levels without a rank. For two units that suffer alike, one of them
    in the dearer level and one in the cheaper costs as much as both half way, and the line says what that gives.
    """
    plain = sorted((level.costs[0], level.divergence) for level in levels if not level.form.rank)
    return [level for level in levels if not level.form.rank or not _beaten(level.costs[0], level.divergence, plain)]


def _beaten(cost: float, divergence: float, plain: Sequence[tuple[float, float]]) -> bool:
    """Whether a level is no better than another that is no dearer, or than the line between two."""
    cheaper = [each for each in plain if each[0] <= cost]
    if any(known <= divergence for _, known in cheaper):
        return True
    dearer = [each for each in plain if each[0] > cost]
    shares = ((one, other, (cost - one[0]) / (other[0] - one[0])) for one in cheaper for other in dearer)
    return any(one[1] + share * (other[1] - one[1]) <= divergence for one, other, share in shares)


def worthwhile(levels: Iterable[Level]) -> tuple[Level, ...]:
    """The levels that buy something: none costs at least as much as another in every measure without less KL."""
    kept: list[Level] = []
    for level in sorted(levels, key=lambda each: (each.costs, each.divergence)):
        # One that comes earlier is never dearer in the leading measure; of equals the first one stays.
        if not any(_covers(other, level) for other in kept):
            kept.append(level)
    return tuple(kept)


def _covers(one: Level, other: Level) -> bool:
    cheaper = all(ours <= theirs for ours, theirs in zip(one.costs, other.costs, strict=True))
    return cheaper and one.divergence <= other.divergence


def total_costs(choices: Sequence[Choice], picks: Picks) -> tuple[float, ...]:
    """What the units cost together, in each measure."""
    each = (choice.levels[pick].costs for choice, pick in zip(choices, picks, strict=True))
    return tuple(map(sum, zip(*each, strict=True)))


def fits(choices: Sequence[Choice], picks: Picks, limits: Sequence[float]) -> bool:
    """Whether a plan keeps within the limit of each measure."""
    costs = total_costs(choices, picks)
    return all(cost <= limit for cost, limit in zip(costs, limits, strict=True))


def lowered(choices: Sequence[Choice], picks: Picks, limits: Sequence[float]) -> Picks:
    """The plan with levels taken back until it fits, such as lose least for what they free of the leading measure.

    `limits` leave room for the first level of every choice.
    """
    current = list(picks)
    while not fits(choices, tuple(current), limits):
        losses = []
        for index, pick in enumerate(current):
            if pick > 0:
                lower, own = choices[index].levels[pick - 1], choices[index].levels[pick]
                freed = max(own.costs[0] - lower.costs[0], 1e-12)
                losses.append(((lower.divergence - own.divergence) / freed, index))
        if not losses:
            break
        current[min(losses)[1]] -= 1
    return tuple(current)


def plan_of(choices: Sequence[Choice], picks: Picks) -> dict[str, WeightFormat]:
    """Format by unit."""
    return {choice.linear: choice.levels[pick].form for choice, pick in zip(choices, picks, strict=True)}
