"""Local search for the plan of least divergence.

Divergences of linears do not add up, so whole plans are measured. Around a plan, divergences of single changes add up
far better than they do from the float model. So every change of one linear is measured, the most promising combinations
that fit are measured in turn, and the search moves to the best one. It ends when none is better. Options that gain
nothing are lowered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, combinations, islice
from typing import Final

from ...models.progress import Progress, silent
from .choices import FormatOption, KnapsackProblem, LinearChoice, Selection, at_most_as_dear, lagrangian_selection

_STAGE: Final = "searching"
_REACH: Final = 2
"""Number of options up and down from the selected one that are measured."""
_MAX_TRIALS: Final = 24
"""Number of combined changes that are measured before a selection counts as a local optimum."""
_MAX_IN_THREES: Final = 100
"""Number of measured changes up to which three are combined: beyond it there are too many combinations."""
_ROUNDS: Final = 20
_SINGLE_SHARE: Final = 0.75
"""Share of the time after which only combinations of the changes measured so far are tried."""
_SCREENING_TOLERANCE: Final = 0.005
"""Relative rise of divergence on part of the text that may be no rise on all of it."""

SelectionDivergence = Callable[[Selection], float]
"""Measures the mean KL of a selection, in nats, once."""
_Change = tuple[int, int, float]
"""A measured change of one linear: index of the choice, index of its new option, and the rise of the divergence."""


def local_search(
    problem: KnapsackProblem,
    start: Selection,
    divergence: SelectionDivergence,
    seconds: float,
    progress: Progress = silent,
) -> list[Selection]:
    """Improve a selection until no measured change is better.

    Args:
        problem: Choices and limit.
        start: Selection that fits the limit.
        divergence: Measures selections.
        seconds: Time after which no further change is measured.
        progress: Receives the stage "searching".

    Returns:
        The start, and every better selection that was found; the best one is the last.
    """
    began, found = time.monotonic(), [start]
    progress(_STAGE, 0.0)
    for _ in range(_ROUNDS):
        changes = []
        for change in _single_changes(problem.choices, found[-1], divergence, began + _SINGLE_SHARE * seconds):
            changes.append(change)
            progress(_STAGE, min(1.0, (time.monotonic() - began) / max(seconds, 1e-9)))
        better = _better(problem, found[-1], divergence, changes, began + seconds)
        if better is None:
            break
        found.append(better)
    progress(_STAGE, 1.0)
    return found


def lower_useless_options(
    choices: Sequence[LinearChoice], start: Selection, divergence: SelectionDivergence, screen: SelectionDivergence
) -> Selection:
    """Lower every linear whose next cheaper option does not raise the divergence.

    A local optimum has no such linear, but the search may have run out of time. Each is screened with `screen` on part
    of the text first, since only few come near to making no difference.
    """
    selection = start
    for index in reversed(range(len(choices))):
        while selection[index] > 0:
            options = choices[index].options
            lower = _changed(selection, ((index, selection[index] - 1),))
            if not at_most_as_dear(options[lower[index]], options[selection[index]]):
                break
            tolerated = (1 + _SCREENING_TOLERANCE) * screen(selection)
            if screen(lower) > tolerated or divergence(lower) > divergence(selection):
                break
            selection = lower
    return selection


def _single_changes(
    choices: Sequence[LinearChoice], selection: Selection, divergence: SelectionDivergence, deadline: float
) -> Iterator[_Change]:
    own = divergence(selection)
    # From the last linear to the first: plans that agree up to a layer share the computation before it.
    for index in reversed(range(len(choices))):
        first = max(0, selection[index] - _REACH)
        last = min(len(choices[index].options) - 1, selection[index] + _REACH)
        for number in range(first, last + 1):
            if number != selection[index] and time.monotonic() <= deadline:
                yield index, number, divergence(_changed(selection, ((index, number),))) - own


def _better(
    problem: KnapsackProblem,
    selection: Selection,
    divergence: SelectionDivergence,
    changes: Sequence[_Change],
    deadline: float,
) -> Selection | None:
    """A selection that fits and is better, or as good and cheaper; None where none was found."""
    best = selection
    for trial in islice(_promising(problem, selection, changes), _MAX_TRIALS):
        if time.monotonic() > deadline:
            break
        best = min(best, trial, key=divergence)
    if best != selection:
        return best
    for index, number, rise in changes:
        options = problem.choices[index].options
        old, new = options[selection[index]], options[number]
        if rise <= 0 and at_most_as_dear(new, old) and new.costs != old.costs:
            return _changed(selection, ((index, number),))
    return None


def _promising(problem: KnapsackProblem, selection: Selection, changes: Sequence[_Change]) -> Iterator[Selection]:
    """Selections that fit and that the single changes predict to be better, the most promising first."""
    yield _best_if_additive(problem, selection, changes)
    expected = []
    sizes = (1, 2, 3) if len(changes) <= _MAX_IN_THREES else (1, 2)
    for group in chain.from_iterable(combinations(changes, size) for size in sizes):
        gain = sum(rise for _, _, rise in group)
        if gain < 0 and len({index for index, _, _ in group}) == len(group):
            trial = _changed(selection, [(index, number) for index, number, _ in group])
            if problem.fits(trial):
                expected.append((gain, trial))
    yield from (trial for _, trial in sorted(expected))


def _best_if_additive(problem: KnapsackProblem, selection: Selection, changes: Sequence[_Change]) -> Selection:
    """The selection that would be best if the measured changes added up."""
    measured: list[dict[int, FormatOption]] = [
        {number: choice.options[number]._replace(divergence=0.0)}
        for choice, number in zip(problem.choices, selection, strict=True)
    ]
    for index, number, rise in changes:
        measured[index][number] = problem.choices[index].options[number]._replace(divergence=rise)
    numbers = [sorted(options) for options in measured]
    around = tuple(
        LinearChoice(choice.linear, tuple(options[number] for number in known))
        for choice, options, known in zip(problem.choices, measured, numbers, strict=True)
    )
    found = lagrangian_selection(KnapsackProblem(around, problem.limit))
    return tuple(known[number] for known, number in zip(numbers, found, strict=True))


def _changed(selection: Selection, changes: Sequence[tuple[int, int]]) -> Selection:
    new = list(selection)
    for index, number in changes:
        new[index] = number
    return tuple(new)
