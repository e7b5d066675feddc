"""Evolutionary and local search for the plan of least divergence.

Source: EvoPress (Sieberling et al., 2024). Divergences of linears do not add up, and what one format gains depends on
the others, so whole plans are measured. Each generation makes offspring of the best plan so far: some linears are
raised by an option and others lowered until the plan fits again. All offspring are measured on a small part of the
text, the better ones on more, and the best few on all of it; the parent stays unless one of them beats it. The result
depends only on the seed, also when the search was interrupted and resumed.

Around the best plan, divergences of single changes add up far better than they do from the float model. So every change
of one linear is measured, the most promising combinations that fit are measured in turn, and the local search moves to
the best one. It ends when none is better. Options that gain nothing are lowered.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations, islice
from pathlib import Path
from typing import Any, Final

from ...models.atomic import write_atomically
from ...models.json_file import parse_json_object
from ...models.progress import Progress, silent
from ...models.regular_file import MAX_JSON_BYTES, read_regular
from .choices import (
    FormatOption,
    KnapsackProblem,
    LinearChoice,
    PlanDivergence,
    Selection,
    at_most_as_dear,
    lagrangian_selection,
    plan_of,
    selected,
)
from .format_candidates import spelled

_STAGE: Final = "searching"
_MAX_RAISED: Final = 3
_MAX_CHANGED: Final = 10
_MIN_SPENT_SHARE: Final = 0.8
"""Smallest share of the freed cost that an offspring must spend again."""
_ATTEMPTS: Final = 50
_LOCAL_STAGE: Final = "local search"
_REACH: Final = 2
"""Number of options up and down from the selected one that are measured."""
_MAX_TRIALS: Final = 24
"""Number of combined changes that are measured before a selection counts as a local optimum."""
_ROUNDS: Final = 20
_SCREENING_TOLERANCE: Final = 0.005
"""Relative rise of divergence on part of the text that may be no rise on all of it."""


@dataclass(frozen=True)
class SearchSettings:
    """Limits and population of a search."""

    seed: int = 0
    generations: int = 200
    """Largest number of generations."""
    patience: int = 25
    """Number of generations without a better plan after which the search ends."""
    seconds: float = 600.0
    """Time after which no generation begins, summed over all runs of a resumed search."""
    offspring: int = 24
    survivors: tuple[int, ...] = (8, 3)
    """Number of plans that pass each stage of measurement but the last."""
    clock: Callable[[], float] = time.monotonic
    """Clock that measures `seconds`."""


@dataclass
class SearchState:
    """State of a search between two generations."""

    parent: Selection
    """The best selection so far."""
    divergence: float
    """Its mean KL in nats on the whole text."""
    generation: int = 0
    idle: int = 0
    """Number of generations since the parent last changed."""
    seconds: float = field(default=0.0, compare=False)
    history: list[tuple[int, float]] = field(default_factory=list)
    """Generation and best divergence, for every improvement."""


class CachedDivergence:
    """Divergence of selections on growing parts of the text (stages), each measured once."""

    def __init__(self, choices: Sequence[LinearChoice], stages: Sequence[PlanDivergence]) -> None:
        self._choices = choices
        self._stages = stages
        self._known: list[dict[Selection, float]] = [{} for _ in stages]

    def __call__(self, selection: Selection, stage: int = -1) -> float:
        """Mean KL in nats of a selection at a stage; the last stage reads the whole text."""
        known = self._known[stage]
        if selection not in known:
            known[selection] = self._stages[stage](plan_of(self._choices, selection))
        return known[selection]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self._stages)


def evolve(
    problem: KnapsackProblem,
    start: Selection,
    divergence: CachedDivergence,
    settings: SearchSettings,
    state_file: Path,
    progress: Progress = silent,
) -> SearchState:
    """Search from a selection that fits the problem.

    Args:
        problem: Choices and limits.
        start: Selection to begin with.
        divergence: Measures selections.
        settings: Limits and population.
        state_file: File of this search alone, which keeps its state after each generation.
        progress: Receives the stage "searching".

    Raises:
        OSError: The disk refused a write.
    """
    began = settings.clock()
    state = _restored(state_file, problem.choices)
    if state is None:
        first = divergence(start)
        state = SearchState(start, first, history=[(0, first)])
    elif not problem.fits(state.parent):
        # A limit of time changes with the machine's speed.
        state.parent = problem.reduced(state.parent)
        state.divergence = divergence(state.parent)
    earlier = state.seconds
    while state.divergence > 0 and state.generation < settings.generations and state.idle < settings.patience:
        state.seconds = earlier + settings.clock() - began
        if state.seconds > settings.seconds:
            break
        _advance(state, problem, divergence, settings)
        _save(state_file, state, problem.choices)
        shares = (
            state.generation / settings.generations,
            state.seconds / settings.seconds,
            state.idle / settings.patience,
        )
        progress(_STAGE, min(1.0, max(shares)))
    progress(_STAGE, 1.0)
    return state


def _advance(
    state: SearchState, problem: KnapsackProblem, divergence: CachedDivergence, settings: SearchSettings
) -> None:
    """Run one generation."""
    # Each generation has its own generator, so that the saved state needs none and a resumed search goes on the same.
    generator = random.Random(f"{settings.seed} {state.generation}")
    alive = sorted({_offspring(state.parent, problem, generator) for _ in range(settings.offspring)} - {state.parent})
    for stage in range(divergence.stages):
        values = {selection: divergence(selection, stage) for selection in alive}
        kept = settings.survivors[stage] if stage < divergence.stages - 1 else 1
        alive = sorted(sorted(alive, key=values.__getitem__)[:kept])
    state.generation += 1
    state.idle += 1
    if alive and divergence(alive[0]) < state.divergence:
        state.parent, state.divergence, state.idle = alive[0], divergence(alive[0]), 0
        state.history.append((state.generation, state.divergence))


def _offspring(parent: Selection, problem: KnapsackProblem, generator: random.Random) -> Selection:
    """A selection that fits and differs from its parent by a few options; the parent where none was found."""
    for _ in range(_ATTEMPTS):
        selection = list(parent)
        raised = min(generator.randint(1, _MAX_RAISED), generator.randint(1, _MAX_RAISED))
        for _ in range(raised):
            index = generator.randrange(len(selection))
            selection[index] = min(selection[index] + 1, len(problem.choices[index].options) - 1)
        while not problem.fits(tuple(selection)):
            lower = [index for index, number in enumerate(selection) if number > 0 and number <= parent[index]]
            if not lower:
                break
            selection[generator.choice(lower)] -= 1
        child = tuple(selection)
        if child != parent and problem.fits(child) and _is_balanced(parent, child, problem.choices):
            return child
    return parent


def _is_balanced(parent: Selection, child: Selection, choices: Sequence[LinearChoice]) -> bool:
    """Whether a child changes few linears and spends about as much as it frees."""
    changed = [index for index, (old, new) in enumerate(zip(parent, child, strict=True)) if old != new]
    if len(changed) > _MAX_CHANGED:
        return False
    freed = added = 0.0
    for index in changed:
        options = choices[index].options
        change = options[child[index]].costs[0] - options[parent[index]].costs[0]
        added, freed = added + max(change, 0.0), freed + max(-change, 0.0)
    return freed == 0 or added >= _MIN_SPENT_SHARE * freed


def _save(file: Path, state: SearchState, choices: Sequence[LinearChoice]) -> None:
    data = asdict(state)
    del data["parent"]
    data["plan"] = {linear: spelled(chosen) for linear, chosen in plan_of(choices, state.parent).items()}
    write_atomically(file, json.dumps(data, indent=1).encode())


def _restored(file: Path, choices: Sequence[LinearChoice]) -> SearchState | None:
    """The state in a file; None where there is none, or where its plan cannot be selected here."""
    try:
        data: dict[str, Any] = parse_json_object(read_regular(file, MAX_JSON_BYTES))
        # By name: with times measured anew other options may be dominated, and the indices differ.
        names = [[spelled(option.weight_format) for option in choice.options] for choice in choices]
        parent = tuple(known.index(data["plan"][choice.linear]) for known, choice in zip(names, choices, strict=True))
        history = [(int(generation), float(value)) for generation, value in data["history"]]
        generation, idle = int(data["generation"]), int(data["idle"])
        return SearchState(parent, float(data["divergence"]), generation, idle, float(data["seconds"]), history)
    except (OSError, ValueError, KeyError, TypeError):
        return None


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
) -> Selection:
    """Improve a selection until no measured change is better.

    Args:
        problem: Choices and limits.
        start: Selection that fits them.
        divergence: Measures selections.
        seconds: Time after which no further change is measured.
        progress: Receives the stage "local search".
    """
    deadline = time.monotonic() + seconds
    selection = start
    for done in range(_ROUNDS):
        progress(_LOCAL_STAGE, done / _ROUNDS)
        changes = list(_single_changes(problem.choices, selection, divergence, deadline))
        better = _better(problem, selection, divergence, changes, deadline)
        if better is None:
            break
        selection = better
    progress(_LOCAL_STAGE, 1.0)
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
    choices: Sequence[LinearChoice], selection: Selection, divergence: CachedDivergence, deadline: float
) -> Iterator[_Change]:
    own = divergence(selection)
    # From the last linear to the first: plans that agree up to a layer share the computation before it.
    for index in reversed(range(len(choices))):
        first = max(0, selection[index] - _REACH)
        last = min(len(choices[index].options) - 1, selection[index] + _REACH)
        for number in range(first, last + 1):
            if number != selection[index] and time.monotonic() <= deadline:
                yield _Change(index, number, divergence(_changed(selection, ((index, number),))) - own)


def _better(
    problem: KnapsackProblem,
    selection: Selection,
    divergence: CachedDivergence,
    changes: Sequence[_Change],
    deadline: float,
) -> Selection | None:
    """A selection that fits and is better, or as good and cheaper; None where none was found."""
    own = divergence(selection)
    best: Selection | None = None
    for trial in islice(_promising(problem, selection, changes), _MAX_TRIALS):
        if time.monotonic() > deadline:
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
    for group in (*combinations(changes, 1), *combinations(changes, 2)):
        gain = sum(change.rise for change in group)
        if gain < 0 and len({change.index for change in group}) == len(group):
            trial = _changed(selection, [(change.index, change.number) for change in group])
            if problem.fits(trial):
                expected.append((gain, trial))
    yield from (trial for _, trial in sorted(expected))


def _best_if_additive(problem: KnapsackProblem, selection: Selection, changes: Sequence[_Change]) -> Selection:
    """The selection that would be best if the measured changes added up."""
    measured: list[dict[int, FormatOption]] = [
        {number: option._replace(divergence=0.0)}
        for number, option in zip(selection, selected(problem.choices, selection), strict=True)
    ]
    for change in changes:
        option = problem.choices[change.index].options[change.number]
        measured[change.index][change.number] = option._replace(divergence=change.rise)
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
