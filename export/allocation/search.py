"""Evolutionary search for the plan of least divergence, after EvoPress (Sieberling et al., 2024).

Divergences of units do not add up, and what a level gains depends on the others: so whole plans are measured. Each
generation makes offspring of the best plan so far: some units are raised by a level and others lowered until the plan
fits again. They are measured on a little text, the better ones on more, the best few on all of it; the parent takes
part and stays unless it is beaten. A seed gives the same plans each time, also when the search was interrupted between.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ...models.atomic import write_atomically
from ...models.json_file import parse_json_object
from ...models.progress import Progress, silent
from .choices import Choice, Divergence, Picks, fits, lowered, plan_of
from .plan_file import spelled

STAGE: Final = "searching"
_MOST_RAISED: Final = 3
_MOST_CHANGED: Final = 10
_LEAST_KEPT: Final = 0.8
"""An offspring must spend again at least this part of what it freed, or the other way round."""
_ATTEMPTS: Final = 50


@dataclass(frozen=True)
class SearchSettings:
    """How long and how widely to search."""

    seed: int = 0
    generations: int = 200
    """At most."""
    patience: int = 25
    """Generations without a better plan after which the search ends."""
    seconds: float = 600.0
    """Time after which no generation begins, over all runs together."""
    offspring: int = 24
    survivors: tuple[int, ...] = (8, 3)
    """How many pass each stage but the last."""


@dataclass
class _State:
    """What a search knows between two generations."""

    parent: Picks
    divergence: float
    generation: int = 0
    idle: int = 0
    """Generations since the parent last changed."""
    seconds: float = 0.0
    history: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Found:
    """The best plan of a search."""

    picks: Picks
    divergence: float
    """Mean KL in nats, on all of the text."""
    history: tuple[tuple[int, float], ...]
    """Measured plans so far and best divergence, whenever it fell."""


class Measured:
    """Divergences of plans at each stage, each measured once."""

    def __init__(self, choices: Sequence[Choice], stages: Sequence[Divergence]) -> None:
        self.count = 0
        """Measurements of whole plans on all of the text."""
        self._choices = choices
        self._stages = stages
        self._known: list[dict[Picks, float]] = [{} for _ in stages]

    def __call__(self, picks: Picks, stage: int = -1) -> float:
        """Mean KL in nats of a plan at a stage, the last one with all of the text."""
        known = self._known[stage]
        if picks not in known:
            self.count += stage in (-1, len(self._stages) - 1)
            known[picks] = self._stages[stage](plan_of(self._choices, picks))
        return known[picks]

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self._stages)


def evolve(
    choices: Sequence[Choice],
    start: Picks,
    limits: Sequence[float],
    measured: Measured,
    settings: SearchSettings,
    checkpoint: Path,
    progress: Progress = silent,
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """Search from a plan within the limits.

    Args:
        choices: the units.
        start: where to begin.
        limits: of each measure, infinite where it has none.
        measured: divergence by plan and stage, from little text to all of it.
        settings: how long and how widely.
        checkpoint: the file that keeps the state after each generation; of this search alone.
        progress: hears stage "searching".
        clock: seconds.

    Raises:
        OSError: the disk refused a write.
    """
    began = clock()
    state = _restored(checkpoint, choices)
    if state is None:
        first = measured(start)
        state = _State(start, first, history=[(0, first)])
    elif not fits(choices, state.parent, limits):
        # A limit of time is another one whenever the machine's speed is.
        state.parent = lowered(choices, state.parent, limits)
        state.divergence = measured(state.parent)
    earlier = state.seconds
    while state.divergence > 0 and state.generation < settings.generations and state.idle < settings.patience:
        state.seconds = earlier + clock() - began
        if state.seconds > settings.seconds:
            break
        _advance(state, choices, limits, measured, settings)
        _save(checkpoint, state, choices)
        progress(STAGE, _share_done(state, settings))
    progress(STAGE, 1.0)
    return Found(state.parent, state.divergence, tuple(state.history))


def _advance(
    state: _State, choices: Sequence[Choice], limits: Sequence[float], measured: Measured, settings: SearchSettings
) -> None:
    """One generation."""
    # A generator for each generation, so that a state is a few numbers and the search goes on the same from it.
    chance = random.Random(f"{settings.seed} {state.generation}")
    alive = list(
        {_offspring(state.parent, choices, limits, chance) for _ in range(settings.offspring)} - {state.parent}
    )
    alive.sort()
    for stage in range(measured.stages):
        values = {picks: measured(picks, stage) for picks in alive}
        kept = settings.survivors[stage] if stage < measured.stages - 1 else 1
        alive = sorted(sorted(alive, key=values.__getitem__)[:kept])
    state.generation += 1
    state.idle += 1
    if alive and measured(alive[0]) < state.divergence:
        state.parent, state.divergence, state.idle = alive[0], measured(alive[0]), 0
        state.history.append((state.generation, state.divergence))


def _offspring(parent: Picks, choices: Sequence[Choice], limits: Sequence[float], chance: random.Random) -> Picks:
    """A plan that is a few levels from its parent and fits; the parent where none was found."""
    for _ in range(_ATTEMPTS):
        picks = list(parent)
        raised = min(chance.randint(1, _MOST_RAISED), chance.randint(1, _MOST_RAISED))
        for _ in range(raised):
            index = chance.randrange(len(picks))
            picks[index] = min(picks[index] + 1, len(choices[index].levels) - 1)
        while not fits(choices, tuple(picks), limits):
            lower = [index for index, pick in enumerate(picks) if pick > 0 and pick <= parent[index]]
            if not lower:
                break
            picks[chance.choice(lower)] -= 1
        found = tuple(picks)
        if found != parent and fits(choices, found, limits) and _is_level(parent, found, choices):
            return found
    return parent


def _is_level(parent: Picks, child: Picks, choices: Sequence[Choice]) -> bool:
    """Whether a child changes few units and spends about as much as it frees."""
    changed = [index for index, (old, new) in enumerate(zip(parent, child, strict=True)) if old != new]
    if len(changed) > _MOST_CHANGED:
        return False
    freed = added = 0.0
    for index in changed:
        levels = choices[index].levels
        change = levels[child[index]].costs[0] - levels[parent[index]].costs[0]
        added, freed = added + max(change, 0.0), freed + max(-change, 0.0)
    return freed == 0 or added >= _LEAST_KEPT * freed


def _share_done(state: _State, settings: SearchSettings) -> float:
    return min(
        1.0,
        max(
            state.generation / settings.generations,
            state.seconds / settings.seconds,
            state.idle / settings.patience,
        ),
    )


def _save(checkpoint: Path, state: _State, choices: Sequence[Choice]) -> None:
    plan = {linear: spelled(form) for linear, form in plan_of(choices, state.parent).items()}
    data = {
        "plan": plan,
        "divergence": state.divergence,
        "generation": state.generation,
        "idle": state.idle,
        "seconds": state.seconds,
        "history": state.history,
    }
    write_atomically(checkpoint, json.dumps(data, indent=1).encode())


def _restored(checkpoint: Path, choices: Sequence[Choice]) -> _State | None:
    """The state of a file; None where there is none, or one whose plan cannot be chosen here."""
    try:
        data: dict[str, Any] = parse_json_object(checkpoint.read_bytes())
        # By name: times measured again may make other levels pointless, and number the rest otherwise.
        names = [[spelled(level.form) for level in choice.levels] for choice in choices]
        parent = tuple(known.index(data["plan"][choice.linear]) for known, choice in zip(names, choices, strict=True))
        history = [(int(when), float(value)) for when, value in data["history"]]
        generation, idle = int(data["generation"]), int(data["idle"])
        state = _State(parent, float(data["divergence"]), generation, idle, float(data["seconds"]), history)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return state
