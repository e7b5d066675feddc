"""A mix for decoding with guesses: no worse than the best one within the budget, and faster with a draft.

With guesses a pass has several rows, and what these cost depends on the formats: with 2 bits almost as much as passes
of their own, with 8 bits little more than one. So among plans that diverge no more and keep to the same budget, the one
that is best for plain decoding is not the fastest with a draft. For a number of guesses, what a token takes is the time
of a pass over so many rows and a constant, shared by the tokens of a round: the search is repeated with a limit on that
time, which is drawn in until plans diverge more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ...edge.errors import InputError
from .allocate import Allocation, Limited
from .budget import Budget, Measure
from .speculation import DraftSpeed, Speculation, expected_tokens, with_draft
from .unit_times import UnitTimes

SEARCHES: Final = 5
"""At most, that for plain decoding included."""
_GUESSES: Final = (1, 3)
"""Of the rounds that searches are made for. What is found is judged by the number that is best for it."""
_DRAWN_IN: Final = 0.97
"""What a search is allowed of the time of a token with the plan before it."""
_USUAL_AGREEMENT: Final = 0.7
_USUAL_DRAFT: Final = 0.08
"""Of a pass of one row."""


def usual_draft(times: UnitTimes, allocation: Allocation) -> DraftSpeed:
    """A draft as one may expect it where none has been measured beside that target."""
    return DraftSpeed(_USUAL_AGREEMENT, _USUAL_DRAFT * times.milliseconds(allocation.plan, 1))


def fastest_with_draft(
    plain: Allocation,
    times: UnitTimes,
    draft: DraftSpeed,
    search: Callable[[Budget, Limited], Allocation],
) -> tuple[Allocation, Speculation]:
    """The plan that decodes fastest with a draft, of those that searches find, and how fast.

    Args:
        plain: the best plan within the budget for plain decoding.
        times: of the target's units.
        draft: its agreement is taken to be that with any plan of no more divergence.
        search: another search that keeps to one more limit, besides that of the budget, of which messages speak in the
            words of the first argument.
    """
    chosen, speed = plain, with_draft(times, plain.plan, draft)
    left = SEARCHES - 1
    for guesses in _GUESSES:
        while left:
            left -= 1
            found = _faster(plain, times, draft, search, guesses, _DRAWN_IN * 1e3 / speed.tokens_per_second)
            faster = None if found is None else with_draft(times, found.plan, draft)
            if found is None or faster is None or faster.tokens_per_second <= speed.tokens_per_second:
                break
            chosen, speed = found, faster
    return chosen, speed


def _faster(
    plain: Allocation,
    times: UnitTimes,
    draft: DraftSpeed,
    search: Callable[[Budget, Limited], Allocation],
    guesses: int,
    milliseconds: float,
) -> Allocation | None:
    """A plan that takes at most so long for a token, with that many guesses a round; None where none is as good."""
    limit = milliseconds * expected_tokens(draft.agreement, guesses) - guesses * draft.milliseconds
    if limit <= 0:
        return None
    rows = guesses + 1
    try:
        found = search(Budget(limit, Measure.MILLISECONDS, rows), Limited(times.costs(rows), limit))
    except InputError:  # no plan is that fast
        return None
    return found if found.divergence <= plain.divergence else None
