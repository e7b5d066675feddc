"""Decoding rates, their ratios to plain decoding with confidence intervals, and when there is no ratio.

Only what follows the first token of an answer counts: prefill costs the same with and without speculation, and matters
less the longer the answer is. The ratio of a category is computed from its summed tokens and seconds, so a long answer
weighs as much as it lasts. The geometric mean of the categories gives each category the same weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import geometric_mean
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...runtime.result import Stats

Float64 = npt.NDArray[np.float64]

PLAIN: Final = "plain"
"""Name of the mode without speculation."""
_RESAMPLES: Final = 2000
MIN_CONVERSATIONS: Final = 3
"""Fewest conversations of a category for which an interval is given."""
_PERCENTILES: Final = (2.5, 97.5)
_MIN_ANSWER_TOKENS: Final = 8
"""Fewest tokens of an answer whose rate is compared with other rates."""
_MIN_ANSWERS: Final = 6
"""Fewest such answers."""


@dataclass(frozen=True)
class MeasuredTurn:
    """Statistics of one turn of a conversation, answered in every mode."""

    category: str
    conversation: int
    """Index of the conversation."""
    turn: int
    """Number of the turn, from 1."""
    stats: Mapping[str, Stats]
    """Statistics of the answers by mode; `PLAIN` is one of the modes."""
    differing: frozenset[str] = frozenset()
    """Modes whose text differs from the text of plain decoding."""
    shortened: bool = False
    """Whether the prompt was shortened to fit the context."""

    @property
    def comparable(self) -> bool:
        """Whether every answer has a second token, so that there are rates to compare."""
        return all(each.decode_tokens and each.decode_s > 0 for each in self.stats.values())


@dataclass(frozen=True)
class Estimate:
    """A ratio and its 95 % confidence interval, by percentile bootstrap over conversations (Efron 1979)."""

    value: float
    interval: tuple[float, float] | None
    """None where a category has too few conversations."""


def round_ms(stats: Stats) -> dict[str, float]:
    """Mean milliseconds of a decoding round of some answers; all 0 without rounds.

    Returns:
        `draft` (passes of the draft model), `target` (the pass of the target), `host` (everything else: looking up
        candidates, pruning, choosing tokens, learning, detokenizing) and the `total`.
    """
    host_s = max(stats.decode_s - stats.draft_s - stats.target_s, 0.0)
    seconds = {"draft": stats.draft_s, "target": stats.target_s, "host": host_s, "total": stats.decode_s}
    scale = 1e3 / stats.decode_passes if stats.decode_passes else 0.0
    return {name: scale * each for name, each in seconds.items()}


@dataclass(frozen=True)
class CategoryResult:
    """One mode on one category of prompts, compared with plain decoding."""

    name: str
    plain: Stats
    stats: Stats
    ratio: Estimate


@dataclass(frozen=True)
class ModeResult:
    """One mode on all prompts, compared with plain decoding."""

    name: str
    categories: tuple[CategoryResult, ...]
    mean: Estimate
    """Geometric mean of the ratios of the categories."""
    plain: Stats
    stats: Stats
    differing: int
    """Number of answers whose text differs from the text of plain decoding."""

    def to_json(self) -> dict[str, Any]:
        """This result as plain values; numbers have five significant digits."""
        stats = self.stats
        described = {
            "geometric_mean": self.mean.value,
            "interval": self.mean.interval,
            "tokens_per_second": stats.decode_tokens_per_second,
            "tokens_per_pass": stats.tokens_per_pass,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "by_source": {name: asdict(counts) for name, counts in stats.by_source.items()},
            "by_depth": list(map(asdict, stats.by_depth)),
            "round_ms": round_ms(stats),
            "answers": stats.answers,
            "differing": self.differing,
            "categories": {each.name: _category_json(each) for each in self.categories},
        }
        return {name: rounded(value) for name, value in described.items()}


def compare_modes(turns: Sequence[MeasuredTurn]) -> list[ModeResult]:
    """Compare every mode with plain decoding, over the comparable turns; empty if there are none."""
    comparable = [turn for turn in turns if turn.comparable]
    return [_compare(comparable, mode) for mode in (comparable[0].stats if comparable else ()) if mode != PLAIN]


def rate_ratio(stats: Stats, plain: Stats) -> float:
    """The decoding rate divided by the rate of plain decoding."""
    plain_rate = plain.decode_tokens_per_second
    return stats.decode_tokens_per_second / plain_rate if plain_rate else 0.0


def _compare(turns: Sequence[MeasuredTurn], mode: str) -> ModeResult:
    by_category = _grouped(turns, "category")
    random = np.random.default_rng(0)  # the same measurement always gives the same interval
    samples = [_bootstrap(group, mode, random) for group in by_category.values()]
    categories = tuple(
        _category(name, group, mode, ratios) for (name, group), ratios in zip(by_category.items(), samples, strict=True)
    )
    means: Float64 = np.exp(np.log(np.array(samples)).mean(axis=0))
    plain, stats = _totals(turns, mode)
    return ModeResult(
        name=mode,
        categories=categories,
        mean=_estimate(geometric_mean([each.ratio.value for each in categories]), means, by_category.values()),
        plain=plain,
        stats=stats,
        differing=sum(mode in turn.differing for turn in turns),
    )


def _category(name: str, turns: Sequence[MeasuredTurn], mode: str, sampled: Float64) -> CategoryResult:
    plain, stats = _totals(turns, mode)
    return CategoryResult(name, plain, stats, _estimate(rate_ratio(stats, plain), sampled, [turns]))


def _grouped(turns: Sequence[MeasuredTurn], field: str) -> dict[Any, list[MeasuredTurn]]:
    values = dict.fromkeys(getattr(turn, field) for turn in turns)
    return {value: [turn for turn in turns if getattr(turn, field) == value] for value in values}


def _totals(turns: Sequence[MeasuredTurn], mode: str) -> tuple[Stats, Stats]:
    """Summed statistics of plain decoding and of a mode."""
    return Stats.total(turn.stats[PLAIN] for turn in turns), Stats.total(turn.stats[mode] for turn in turns)


def _bootstrap(turns: Sequence[MeasuredTurn], mode: str, random: np.random.Generator) -> Float64:
    """Ratios of a category, float64 `[resamples]`, each over conversations drawn with replacement.

    The turns of a conversation are drawn together, because they depend on each other.
    """
    totals = [_totals(group, mode) for group in _grouped(turns, "conversation").values()]
    # float64 [conversations, 4]: tokens and seconds of plain decoding, then of the mode
    parts = np.array([(each.decode_tokens, each.decode_s) for both in totals for each in both], np.float64).reshape(
        -1, 4
    )
    drawn = parts[random.integers(len(parts), size=(_RESAMPLES, len(parts)))].sum(axis=1)
    ratios: Float64 = (drawn[:, 2] / drawn[:, 3]) / (drawn[:, 0] / drawn[:, 1])
    return ratios


def _estimate(value: float, sampled: Float64, groups: Iterable[Sequence[MeasuredTurn]]) -> Estimate:
    if any(len({turn.conversation for turn in group}) < MIN_CONVERSATIONS for group in groups):
        return Estimate(value, None)
    low, high = map(float, np.percentile(sampled, _PERCENTILES))
    return Estimate(value, (low, high))


def _category_json(category: CategoryResult) -> dict[str, Any]:
    stats = category.stats
    return {
        "answers": stats.answers,
        "tokens": stats.decode_tokens,
        "plain_tokens_per_second": category.plain.decode_tokens_per_second,
        "tokens_per_second": stats.decode_tokens_per_second,
        "ratio": category.ratio.value,
        "interval": category.ratio.interval,
        "tokens_per_pass": stats.tokens_per_pass,
        "acceptance_rate": stats.draft_counts.acceptance_rate,
    }


def rounded(value: Any) -> Any:
    """A JSON value whose floats have five significant digits."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def spread_of_plain(turns: Sequence[MeasuredTurn]) -> float:
    """Upper quartile of plain decoding's rates over the lower one; 1 with too few answers to tell."""
    plain = [turn.stats[PLAIN] for turn in turns]
    rates = [each.decode_tokens_per_second for each in plain if each.decode_tokens >= _MIN_ANSWER_TOKENS]
    if len(rates) < _MIN_ANSWERS:
        return 1.0
    low, high = map(float, np.percentile(rates, (25, 75)))
    return high / low
