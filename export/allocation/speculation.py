"""How fast a plan decodes with a draft: expected tokens a second, from the time of passes and how often guesses hold.

A round has g guesses of a draft, one after the other, and one pass of the target over 1 + g rows. With a share a of
guesses right, whatever comes before, it gives 1 + a + ... + a ** g tokens: the objective that the runtime prunes drafts
by, for a chain. How wide a pass may be before a row costs more than the token it may give depends on the formats. So
the best plan for decoding with guesses is not the best one for decoding without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ...models.manifest import WeightFormat
from ..checkpoint.layout import FusedLinear
from .linear_times import LinearTimes, at_rows

MOST_GUESSES: Final = 15
"""Of a round."""


@dataclass(frozen=True)
class DraftSpeed:
    """What a draft is worth and takes."""

    agreement: float
    """Share of its guesses that the target agrees with, 0 to 1."""
    milliseconds: float
    """Of one guess."""


@dataclass(frozen=True)
class Speculation:
    """Decoding with the number of guesses that is best on average."""

    candidates: int
    """In a round; 0 where none pays."""
    tokens: float
    """Of a round."""
    milliseconds: float
    """Of a round."""

    @property
    def tokens_per_second(self) -> float:
        """Expected."""
        return 1e3 * self.tokens / self.milliseconds


@dataclass(frozen=True)
class Candidate:
    """A plan whose quality is known."""

    plan: Mapping[str, WeightFormat]
    divergence: float
    """Mean KL in nats."""
    draft: DraftSpeed
    """The draft beside a target of that plan: another plan agrees with its draft more or less often."""


def expected_tokens(agreement: float, candidates: int) -> float:
    """Of a round with that many guesses, the certain one included."""
    return sum(agreement**depth for depth in range(candidates + 1))


def speculation(pass_milliseconds: Callable[[int], float], draft: DraftSpeed) -> Speculation:
    """Decode with the number of guesses that gives most tokens a second.

    Args:
        pass_milliseconds: of a pass of the target over so many rows.
        draft: beside it.

    Raises:
        ValueError: the agreement is none.
    """
    if not 0 <= draft.agreement <= 1:
        raise ValueError(f"{draft.agreement} is no share of guesses")
    rounds = (
        Speculation(
            candidates,
            expected_tokens(draft.agreement, candidates),
            pass_milliseconds(candidates + 1) + candidates * draft.milliseconds,
        )
        for candidates in range(MOST_GUESSES + 1)
    )
    return max(rounds, key=lambda each: (each.tokens_per_second, -each.candidates))


def with_draft(times: LinearTimes, plan: Mapping[str, WeightFormat], draft: DraftSpeed) -> Speculation:
    """What a target with that plan is expected to do beside a draft."""
    return speculation(lambda rows: times.milliseconds(plan, rows), draft)


def fastest(times: LinearTimes, candidates: Iterable[Candidate], most_divergence: float) -> Candidate | None:
    """The plan that is expected to decode fastest with its draft, among those of at most that divergence."""
    allowed = [each for each in candidates if each.divergence <= most_divergence]
    return max(allowed, key=lambda each: with_draft(times, each.plan, each.draft).tokens_per_second, default=None)


class SpeculativeCosts:
    """Milliseconds of a token, decoded with a fixed number of guesses a round; `Costs` of plans.

    For a given number of guesses, what a round takes is a sum over units like the time of any pass, so plans can be
    searched for in this measure. `with_draft` says which number is the best for the plan that is found.
    """

    def __init__(self, times: LinearTimes, draft: DraftSpeed, candidates: int) -> None:
        self._times = times
        self._rows = candidates + 1
        self._drafting = candidates * draft.milliseconds
        self._tokens = expected_tokens(draft.agreement, candidates)

    @property
    def fixed(self) -> float:
        """What a token takes besides the target's units."""
        return (at_rows(self._times.rest, self._rows) + self._drafting) / self._tokens

    def of(self, linear: FusedLinear, form: WeightFormat) -> float:
        """What a unit takes of a token."""
        return self._times.linear(linear, form, self._rows) / self._tokens
