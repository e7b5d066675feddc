"""Local search around the best plan of the evolutionary search.

Around a plan, divergences of single changes add up far better than they do from the float model. So every change of one
linear is measured, the most promising combinations that fit are measured in turn, and the search moves to the best one.
It ends when none is better. Options that gain nothing are lowered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import Final

from ...models.progress import Progress, silent
from .choices import FormatOption, KnapsackProblem, LinearChoice, Selection, at_most_as_dear
from .evolutionary_search import CachedDivergence
from .lagrange import lagrangian_selection

STAGE: Final = "local search"
_REACH: Final = 2
"""Number of options up and down from the selected one that are measured."""
_MAX_TRIALS: Final = 24
"""Number of combined changes that are measured before a selection counts as a local optimum."""
_ROUNDS: Final = 20
_SCREENING_TOLERANCE: Final = 0.005
"""Relative rise of divergence on part of the text that may be no rise on all of it."""


@dataclass(frozen=True)
class _Change:
    """A measured change of one linear."""

    index: int
    """Index of the choice."""
    number: int
    """Index of its new option."""
    rise: float
    """Rise of the divergence, in nats."""


def local_search(
    problem: KnapsackProblem,
    start: Selection,
    divergence: CachedDivergence,
    seconds: float,
    progress: Progress = silent,
    clock: Callable[[], float] = time.monotonic,
) -> Selection:
    """Improve a selection until no measured change is better.

    Args:
        problem: Choices and limits.
        start: Selection that fits them.
        divergence: Measures selections.
        seconds: Time after which no further change is measured.
        progress: Receives the stage "local search".
        clock: Clock that measures `seconds`.
    """
    deadline = clock() + seconds

    def is_late() -> bool:
        return clock() > deadline

    selection = start
    for done in range(_ROUNDS):
        progress(STAGE, done / _ROUNDS)
        changes = list(_single_changes(problem.choices, selection, divergence, is_late))
        better = _better(problem, selection, divergence, changes, is_late)
        if better is None:
            break
        selection = better
    progress(STAGE, 1.0)
    return selection


def lower_useless_options(choices: Sequence[LinearChoice], start: Selection, divergence: CachedDivergence) -> Selection:
    """Lower every linear whose next cheaper option does not raise the divergence.

    A local optimum has no such linear, but the search may have run out of time. Each is screened on part of the text
    first, since only few come near to making no difference.
    """
    selection = start
    for index in reversed(range(len(choices))):
        while selection[index] > 0:
            options = choices[index].options
            lower = _changed(selection, ((index, selection[index] - 1),))
            if not at_most_as_dear(options[lower[index]], options[selection[index]]):
                break
            screen = max(0, divergence.stages - 2)
            tolerated = (1 + _SCREENING_TOLERANCE) * divergence(selection, screen)
            if divergence(lower, screen) > tolerated or divergence(lower) > divergence(selection):
                break
            selection = lower
    return selection


def _single_changes(
    choices: Sequence[LinearChoice],
    selection: Selection,
    divergence: CachedDivergence,
    is_late: Callable[[], bool],
) -> Iterator[_Change]:
    own = divergence(selection)
    # From the last linear to the first: plans that agree up to a layer share the computation before it.
    for index in reversed(range(len(choices))):
        first = max(0, selection[index] - _REACH)
        last = min(len(choices[index].options) - 1, selection[index] + _REACH)
        for number in range(first, last + 1):
            if number != selection[index] and not is_late():
                yield _Change(index, number, divergence(_changed(selection, ((index, number),))) - own)


def _better(
    problem: KnapsackProblem,
    selection: Selection,
    divergence: CachedDivergence,
    changes: Sequence[_Change],
    is_late: Callable[[], bool],
) -> Selection | None:
    """A selection that fits and is better, or as good and cheaper; None where none was found."""
    own = divergence(selection)
    best: Selection | None = None
    for trial in islice(_promising(problem, selection, changes), _MAX_TRIALS):
        if is_late():
            break
        if divergence(trial) < (own if best is None else divergence(best)):
            best = trial
    if best is not None:
        return best
    for change in changes:
        options = problem.choices[change.index].options
        old, new = options[selection[change.index]], options[change.number]
        if change.rise <= 0 and at_most_as_dear(new, old) and new.costs != old.costs:
            return _changed(selection, ((change.index, change.number),))
    return None


def _promising(problem: KnapsackProblem, selection: Selection, changes: Sequence[_Change]) -> Iterator[Selection]:
    """Selections that fit and that the single changes predict to be better, the most promising first."""
    yield _best_if_additive(problem, selection, changes)
    expected = []
    singles = [(each,) for each in changes]
    for group in (*singles, *combinations(changes, 2)):
        gain = sum(change.rise for change in group)
        if gain < 0 and len({change.index for change in group}) == len(group):
            trial = _changed(selection, [(change.index, change.number) for change in group])
            if problem.fits(trial):
                expected.append((gain, trial))
    yield from (trial for _, trial in sorted(expected))


def _best_if_additive(problem: KnapsackProblem, selection: Selection, changes: Sequence[_Change]) -> Selection:
    """The selection that would be best if the measured changes added up."""
    measured: list[dict[int, FormatOption]] = [
        {number: replace(choice.options[number], divergence=0.0)}
        for choice, number in zip(problem.choices, selection, strict=True)
    ]
    for change in changes:
        option = problem.choices[change.index].options[change.number]
        measured[change.index][change.number] = replace(option, divergence=change.rise)
    numbers = [sorted(options) for options in measured]
    around = tuple(
        LinearChoice(choice.linear, tuple(options[number] for number in known))
        for choice, options, known in zip(problem.choices, measured, numbers, strict=True)
    )
    found = lagrangian_selection(KnapsackProblem(around, problem.limits))
    return tuple(known[number] for known, number in zip(numbers, found, strict=True))


def _changed(selection: Selection, changes: Sequence[tuple[int, int]]) -> Selection:
    new = list(selection)
    for index, number in changes:
        new[index] = number
    return tuple(new)
