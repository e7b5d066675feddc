"""From single answers to numbers: rates, ratios and their uncertainty.

Only what follows an answer's first token counts: reading the prompt costs the same with and without speculation, and
the longer the answer, the less it matters. A category's ratio is that of its summed tokens and summed seconds, so that
long answers weigh what they last; the categories' geometric mean weighs every category alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

PLAIN: Final = "plain"
"""The name of decoding without speculation."""
_RESAMPLES: Final = 2000
_FEWEST: Final = 3
"""Conversations of a category, to say how much they differ."""
_INTERVAL: Final = (2.5, 97.5)


@dataclass(frozen=True)
class Count:
    """Guesses that were verified, and how many of them were right."""

    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.drafted + other.drafted, self.accepted + other.accepted)

    @property
    def share(self) -> float:
        """Accepted by drafted; 0 when there were none."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True)
class Run:
    """What one answer, or several, cost after the first token. Times are seconds."""

    tokens: int = 0
    """Tokens after the first; an end-of-text token is one."""
    seconds: float = 0.0
    passes: int = 0
    """Passes over the weights: one a round."""
    candidates: Count = Count()
    by_source: Mapping[str, Count] = field(default_factory=dict)
    by_depth: tuple[Count, ...] = ()
    """Index 0 is a guess at the token right after the anchor."""
    draft_s: float = 0.0
    """In passes of the draft model."""
    target_s: float = 0.0
    """In passes of the target."""
    host_s: float = 0.0
    """Looking guesses up, pruning and learning; what is left is choosing tokens and making text of them."""
    prompt_s: float = 0.0
    """Up to the first token."""

    def __add__(self, other: Run) -> Run:
        depths = max(len(self.by_depth), len(other.by_depth))
        padded = [(*each.by_depth, *[Count()] * (depths - len(each.by_depth))) for each in (self, other)]
        names = dict.fromkeys((*self.by_source, *other.by_source))
        return Run(
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            self.passes + other.passes,
            self.candidates + other.candidates,
            {name: self.by_source.get(name, Count()) + other.by_source.get(name, Count()) for name in names},
            tuple(one + two for one, two in zip(*padded, strict=True)),
            self.draft_s + other.draft_s,
            self.target_s + other.target_s,
            self.host_s + other.host_s,
            self.prompt_s + other.prompt_s,
        )

    @classmethod
    def total(cls, runs: Iterable[Run]) -> Run:
        """The sum of several."""
        return sum(runs, cls())

    @property
    def rate(self) -> float:
        """Tokens a second; 0 when nothing was measured."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """1 without speculation."""
        return self.tokens / self.passes if self.passes else 1.0

    @property
    def between_s(self) -> float:
        """Seconds between passes: `host_s` and all else that is not a pass."""
        return max(self.seconds - self.draft_s - self.target_s, 0.0)

    def each_pass_ms(self, seconds: float) -> float:
        """Milliseconds a pass that a total of `seconds` comes to."""
        return 1e3 * seconds / self.passes if self.passes else 0.0


@dataclass(frozen=True)
class Trial:
    """One turn, answered by every contender."""

    category: str
    conversation: int
    turn: int
    """1 for a conversation's first."""
    runs: Mapping[str, Run]
    """By the contender's name; `PLAIN` is one."""
    differing: frozenset[str] = frozenset()
    """Contenders whose text was not plain decoding's."""
    context: int = 0
    """Tokens of the prompt."""

    @property
    def counts(self) -> bool:
        """Whether there is anything to compare: every answer has a second token."""
        return all(run.tokens and run.seconds > 0 for run in self.runs.values())


@dataclass(frozen=True)
class Estimate:
    """A ratio and the interval that holds it with 95 % confidence (percentile bootstrap over conversations)."""

    value: float
    interval: tuple[float, float] | None
    """None where a category has too few conversations to tell."""


@dataclass(frozen=True)
class CategoryAccount:
    """One category under one contender, against plain decoding."""

    name: str
    answers: int
    plain: Run
    run: Run
    ratio: Estimate
    quartiles: tuple[float, float, float]
    """Of the ratios of single answers."""


@dataclass(frozen=True)
class Account:
    """One contender against plain decoding."""

    name: str
    categories: tuple[CategoryAccount, ...]
    mean: Estimate
    """Geometric mean of the categories' ratios."""
    plain: Run
    run: Run
    by_turn: Mapping[int, float]
    """Ratio over all answers that are a conversation's first, second, ... turn."""
    answers: int
    differing: int
    """Answers whose text was not plain decoding's."""


def accounts(trials: Sequence[Trial]) -> list[Account]:
    """The account of every contender but plain decoding; none if no trial counts."""
    counted = [trial for trial in trials if trial.counts]
    return [_account(counted, name) for name in (counted[0].runs if counted else ()) if name != PLAIN]


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers, at least one."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def ratio(run: Run, plain: Run) -> float:
    """How many times plain decoding's rate; with the same text, plain seconds by seconds."""
    return run.rate / plain.rate if plain.rate else 0.0


def _account(trials: Sequence[Trial], name: str) -> Account:
    groups: dict[str, list[Trial]] = {}
    turns: dict[int, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.category, []).append(trial)
        turns.setdefault(trial.turn, []).append(trial)
    random = np.random.default_rng(0)  # the same interval for the same measurement
    draws = [_resampled(group, name, random) for group in groups.values()]
    categories = tuple(
        _category(category, group, name, drawn) for (category, group), drawn in zip(groups.items(), draws, strict=True)
    )
    means: Float64 = np.exp(np.log(np.array(draws)).mean(axis=0))
    plain, run = _sums(trials, name)
    return Account(
        name=name,
        categories=categories,
        mean=_estimate(geometric_mean([each.ratio.value for each in categories]), means, groups.values()),
        plain=plain,
        run=run,
        by_turn={turn: ratio(*reversed(_sums(group, name))) for turn, group in sorted(turns.items())},
        answers=len(trials),
        differing=sum(name in trial.differing for trial in trials),
    )


def _category(category: str, trials: Sequence[Trial], name: str, drawn: Float64) -> CategoryAccount:
    plain, run = _sums(trials, name)
    single = [ratio(trial.runs[name], trial.runs[PLAIN]) for trial in trials]
    low, middle, high = (float(value) for value in np.percentile(single, (25, 50, 75)))
    return CategoryAccount(
        category, len(trials), plain, run, _estimate(ratio(run, plain), drawn, [trials]), (low, middle, high)
    )


def _sums(trials: Sequence[Trial], name: str) -> tuple[Run, Run]:
    """Plain decoding's sum and the contender's."""
    return Run.total(trial.runs[PLAIN] for trial in trials), Run.total(trial.runs[name] for trial in trials)


def _resampled(trials: Sequence[Trial], name: str, random: np.random.Generator) -> Float64:
    """float64 `[resamples]`: the category's ratio, had other conversations of its kind been drawn.

    The turns of a conversation are drawn together, because they are alike.
    """
    conversations: dict[int, list[Trial]] = {}
    for trial in trials:
        conversations.setdefault(trial.conversation, []).append(trial)
    sums = [_sums(group, name) for group in conversations.values()]
    # float64 [conversations, 4]: plain tokens and seconds, the contender's tokens and seconds
    parts = np.array([(plain.tokens, plain.seconds, run.tokens, run.seconds) for plain, run in sums], np.float64)
    drawn = parts[random.integers(len(parts), size=(_RESAMPLES, len(parts)))].sum(axis=1)
    ratios: Float64 = (drawn[:, 2] / drawn[:, 3]) / (drawn[:, 0] / drawn[:, 1])
    return ratios


def _estimate(value: float, drawn: Float64, groups: Iterable[Sequence[Trial]]) -> Estimate:
    if any(len({trial.conversation for trial in group}) < _FEWEST for group in groups):
        return Estimate(value, None)
    low, high = (float(edge) for edge in np.percentile(drawn, _INTERVAL))
    return Estimate(value, (low, high))


def as_mapping(account: Account) -> dict[str, Any]:
    """An account in plain values, for JSON; numbers have five significant digits."""
    run = account.run
    return {
        "geometric_mean": _short(account.mean.value),
        "interval": _interval(account.mean),
        "tokens_per_second": _short(run.rate),
        "tokens_per_pass": _short(run.tokens_per_pass),
        "drafted": run.candidates.drafted,
        "accepted": run.candidates.accepted,
        "by_source": {name: _counted(count) for name, count in run.by_source.items()},
        "by_depth": [_counted(count) for count in run.by_depth],
        "round_ms": {
            "draft": _short(run.each_pass_ms(run.draft_s)),
            "target": _short(run.each_pass_ms(run.target_s)),
            "host": _short(run.each_pass_ms(run.between_s)),
            "host_drafting": _short(run.each_pass_ms(run.host_s)),
            "all": _short(run.each_pass_ms(run.seconds)),
        },
        "by_turn": {str(turn): _short(value) for turn, value in account.by_turn.items()},
        "answers": account.answers,
        "differing": account.differing,
        "categories": {each.name: _category_mapping(each) for each in account.categories},
    }


def _category_mapping(each: CategoryAccount) -> dict[str, Any]:
    return {
        "answers": each.answers,
        "tokens": each.run.tokens,
        "plain_tokens_per_second": _short(each.plain.rate),
        "tokens_per_second": _short(each.run.rate),
        "ratio": _short(each.ratio.value),
        "interval": _interval(each.ratio),
        "quartiles": [_short(value) for value in each.quartiles],
        "tokens_per_pass": _short(each.run.tokens_per_pass),
        "acceptance": _short(each.run.candidates.share),
    }


def _counted(count: Count) -> dict[str, int]:
    return {"drafted": count.drafted, "accepted": count.accepted}


def _interval(estimate: Estimate) -> list[float] | None:
    return None if estimate.interval is None else [_short(edge) for edge in estimate.interval]


def _short(value: float) -> float:
    return float(f"{value:.5g}")
