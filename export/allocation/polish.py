"""The end of a search: from the best plan found, every change of one unit is measured, and what follows from it tried.

Around a plan divergences add up far better than they do from nothing. So the measured changes of single units say what
changes of several would give, and the most promising ones that fit are measured in their turn. It ends when none of
them is better. A unit that is then at a level which buys nothing has been lowered: that is one of the changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, islice
from typing import Final

from ...models.progress import Progress, silent
from .choices import Choice, Picks, fits
from .lagrange import seed_plan
from .search import Measured

STAGE: Final = "polishing"
_REACH: Final = 2
"""Levels up and down that are looked at."""
_TRIED: Final = 24
"""Combined changes that are measured before a plan counts as the best around."""
_ROUNDS: Final = 20
_NEAR: Final = 0.005
"""A rise of divergence by this part, on some of the text, may be none on all of it."""


def polished(
    choices: Sequence[Choice],
    start: Picks,
    limits: Sequence[float],
    measured: Measured,
    seconds: float,
    progress: Progress = silent,
    clock: Callable[[], float] = time.monotonic,
) -> Picks:
    """The best plan within reach.

    Args:
        choices: the units.
        start: where to begin; within the limits.
        limits: of each measure, infinite where it has none.
        measured: divergence by plan.
        seconds: after which no change is measured any more.
        progress: hears stage "polishing".
        clock: seconds.
    """
    deadline = clock() + seconds
    picks = start
    for done in range(_ROUNDS):
        progress(STAGE, done / _ROUNDS)
        changes = list(_single_changes(choices, picks, measured, lambda: clock() > deadline))
        better = _better(choices, picks, limits, measured, changes, lambda: clock() > deadline)
        if better is None:
            break
        picks = better
    progress(STAGE, 1.0)
    return picks


def without_vain_levels(choices: Sequence[Choice], start: Picks, measured: Measured) -> Picks:
    """The plan with every unit lowered whose next cheaper level gives no more divergence.

    A polished plan has no such unit, but a search may run out of time. Units are told by part of the text first: few
    come near to making no difference.
    """
    picks = start
    for index in reversed(range(len(choices))):
        while picks[index] > 0:
            lower = _changed(picks, ((index, picks[index] - 1),))
            old, new = (choices[index].levels[plan[index]].costs for plan in (picks, lower))
            if any(one > other for one, other in zip(new, old, strict=True)):
                break
            screen = max(0, measured.stages - 2)
            if measured(lower, screen) > (1 + _NEAR) * measured(picks, screen) or measured(lower) > measured(picks):
                break
            picks = lower
    return picks


Change = tuple[int, int, float]
"""A choice's number, its new level, and by how much the divergence rises."""


def _single_changes(
    choices: Sequence[Choice], picks: Picks, measured: Measured, late: Callable[[], bool]
) -> Iterator[Change]:
    own = measured(picks)
    # From the last unit to the first: plans that agree up to there share the work before it.
    for index in reversed(range(len(choices))):
        for pick in range(max(0, picks[index] - _REACH), min(len(choices[index].levels), picks[index] + _REACH + 1)):
            if pick != picks[index] and not late():
                yield index, pick, measured(_changed(picks, ((index, pick),))) - own


def _better(
    choices: Sequence[Choice],
    picks: Picks,
    limits: Sequence[float],
    measured: Measured,
    changes: Sequence[Change],
    late: Callable[[], bool],
) -> Picks | None:
    """A plan within the limits that is better than `picks`, or as good and cheaper; None where none was found."""
    own = measured(picks)
    best: Picks | None = None
    for trial in islice(_promising(choices, picks, limits, changes), _TRIED):
        if late():
            break
        if measured(trial) < (own if best is None else measured(best)):
            best = trial
    if best is not None:
        return best
    # What is left is to be paid for: a level that buys nothing goes.
    for index, pick, change in changes:
        old, new = choices[index].levels[picks[index]].costs, choices[index].levels[pick].costs
        cheaper = all(one <= other for one, other in zip(new, old, strict=True)) and new != old
        if change <= 0 and cheaper:
            return _changed(picks, ((index, pick),))
    return None


def _promising(
    choices: Sequence[Choice], picks: Picks, limits: Sequence[float], changes: Sequence[Change]
) -> Iterator[Picks]:
    """Plans within the limits that the single changes speak for, the best first."""
    yield _as_if_additive(choices, picks, limits, changes)
    expected = []
    singles = [(each,) for each in changes]
    for group in (*singles, *combinations(changes, 2)):
        gain = sum(change for _, _, change in group)
        if gain < 0 and len({index for index, _, _ in group}) == len(group):
            trial = _changed(picks, [(index, pick) for index, pick, _ in group])
            if fits(choices, trial, limits):
                expected.append((gain, trial))
    yield from (trial for _, trial in sorted(expected))


def _as_if_additive(
    choices: Sequence[Choice], picks: Picks, limits: Sequence[float], changes: Sequence[Change]
) -> Picks:
    """The plan that would be best if the changes added up."""
    levels = [{pick: choices[index].levels[pick]} for index, pick in enumerate(picks)]
    for index, pick, change in changes:
        levels[index][pick] = replace(choices[index].levels[pick], divergence=change)
    near = []
    numbers = []
    for choice, own, known in zip(choices, picks, levels, strict=True):
        known[own] = replace(known[own], divergence=0.0)
        numbers.append(sorted(known))
        near.append(Choice(choice.linear, tuple(known[pick] for pick in numbers[-1])))
    found = seed_plan(near, limits)
    return tuple(known[pick] for known, pick in zip(numbers, found, strict=True))


def _changed(picks: Picks, changes: Sequence[tuple[int, int]]) -> Picks:
    new = list(picks)
    for index, pick in changes:
        new[index] = pick
    return tuple(new)
