"""A mix of formats for decoding with guesses: as near to the float model as another, and faster beside its draft.

A pass that verifies guesses has more rows, and what a row costs depends on the format: 8 bits verify wide passes nearly
as fast as 4. So the plan of most tokens a second is another one than that of least time for a single token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from .allocation.allocate import Allocation, Limited
from .allocation.choices import Divergence, choices_of, fits, plan_of
from .allocation.format_candidates import with_embedding
from .allocation.lagrange import seed_plan
from .allocation.linear_times import LinearTimes
from .allocation.speculation import Candidate, DraftSpeed, SpeculativeCosts, fastest, with_draft
from .progress import Progress

_STAGE: Final = "plans for guesses"
_MOST_GUESSES: Final = 4
_STEPS: Final = 7
"""Bisections of the time that a plan may take."""
_LEAST_GAIN: Final = 1.005
"""Times as fast as the plan for plain decoding that another one must be."""


@dataclass(frozen=True)
class Faster:
    """The plan that was found, and the rates that are expected of it and of the other."""

    allocation: Allocation
    rate: float
    """Tokens a second with guesses."""
    plain_rate: float
    """The same of the plan for plain decoding."""


def faster_with_guesses(
    allocation: Allocation,
    limited: Limited,
    divergence: Divergence,
    times: LinearTimes,
    draft: DraftSpeed,
    progress: Progress,
) -> Faster:
    """Look for a plan that diverges no more than another and decodes faster with a draft.

    Args:
        allocation: the plan for plain decoding, which stays unless another is better.
        limited: the budget, which no plan exceeds.
        divergence: measures plans as it was measured.
        times: of passes on this machine.
        draft: beside the model.
        progress: hears the stage "plans for guesses".
    """
    plain = Candidate(allocation.plan, allocation.divergence, draft)
    others: list[Candidate] = []
    for candidates in range(_MOST_GUESSES + 1):
        others += _candidates(allocation, limited, divergence, times, draft, candidates)
        progress(_STAGE, (candidates + 1) / (_MOST_GUESSES + 1))
    rate = with_draft(times, plain.plan, draft).tokens_per_second
    best = fastest(times, others, allocation.divergence)
    if best is None:
        return Faster(allocation, rate, rate)
    found = with_draft(times, best.plan, draft).tokens_per_second
    if found < _LEAST_GAIN * rate:
        return Faster(allocation, rate, rate)
    return Faster(replace(allocation, plan=best.plan, divergence=best.divergence), found, rate)


def _candidates(
    allocation: Allocation,
    limited: Limited,
    divergence: Divergence,
    times: LinearTimes,
    draft: DraftSpeed,
    candidates: int,
) -> Iterator[Candidate]:
    """Plans of little time with so many guesses a round, down to where they diverge more than the given one."""
    config = times.config
    costs = SpeculativeCosts(times, draft, candidates)
    choices = choices_of(config, allocation.solos, [costs, limited.costs])
    budget = limited.room
    low = sum(min(level.costs[0] for level in choice.levels) for choice in choices)
    high = sum(max(level.costs[0] for level in choice.levels) for choice in choices)
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        picks = seed_plan(choices, [middle, budget])
        plan = plan_of(choices, picks)
        measured = divergence(plan)
        if measured <= allocation.divergence and fits(choices, picks, [math.inf, budget]):
            yield Candidate(with_embedding(config, plan), measured, draft)
            high = middle
        else:
            low = middle
