"""The first line of a measurement: how much faster a mode is, or why that cannot be said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from .ratios import MIN_CONVERSATIONS, PLAIN, Estimate, MeasuredTurn, ModeResult

_MIN_TOKENS: Final = 100
"""Fewest tokens after the first one, of all answers of a mode, that give a ratio."""
_MIN_ANSWER_TOKENS: Final = 8
"""Fewest tokens of an answer whose rate is compared with those of others."""
_MIN_ANSWERS: Final = 6
"""Fewest such answers."""
_MAX_SPREAD: Final = 1.5
"""Ratio of the quartiles of plain decoding's rates above which the machine was not steady."""


@dataclass(frozen=True)
class MachineLoad:
    """What the machine did besides the measurement."""

    others: float | None = None
    """Mean number of processors that other programs used meanwhile; None where the system does not tell it."""
    busy: bool = False
    """Whether they took processors that the measurement needed."""
    plain_spread: float = 1.0
    """Upper quartile of the rates of plain decoding's answers over the lower one."""


def headline(mode: ModeResult, load: MachineLoad) -> str:
    """A sentence with the ratio of a mode and its interval; without a ratio, with the reason and what to do."""
    reason = reason_without_ratio(mode, load)
    if reason is not None:
        return f"{mode.name}: no ratio, because {reason}"
    rate, plain = mode.stats.decode_tokens_per_second, mode.plain.decode_tokens_per_second
    return (
        f"{mode.name}: {mode.mean.value:.2f} times as fast as plain decoding{_interval_text(mode.mean)}, "
        f"{rate:.1f} and {plain:.1f} tokens a second"
    )


def reason_without_ratio(mode: ModeResult, load: MachineLoad) -> str | None:
    """Why the ratio of a mode says nothing, and what to do; None if it does."""
    if not mode.stats.drafted:
        return (
            "no draft token was verified: both modes did the same. Give prompts like those you use (--prompts), "
            "longer answers (--max-tokens) or a draft model (--draft)"
        )
    tokens = min(mode.stats.decode_tokens, mode.plain.decode_tokens)
    if tokens < _MIN_TOKENS:
        return (
            f"the answers had only {tokens} tokens after their first ones, and {_MIN_TOKENS} are needed. "
            "Give more prompts, or more --max-tokens"
        )
    if mode.mean.interval is None:
        return (
            f"a category has fewer than {MIN_CONVERSATIONS} conversations with answers to compare. "
            "Give more prompts, or a larger --limit"
        )
    if load.busy:
        used = "" if load.others is None else f" (they used {load.others:.1f} processors on average)"
        return f"other programs used the processor meanwhile{used}. Close them and measure again"
    if load.plain_spread > _MAX_SPREAD:
        return (
            f"the machine was not steady: of the answers of plain decoding, the faster ones ran at "
            f"{load.plain_spread:.1f} times the speed of the slower ones. Measure again when nothing else runs"
        )
    return None


def spread_of_plain(turns: Sequence[MeasuredTurn]) -> float:
    """Upper quartile of plain decoding's rates over the lower one; 1 with too few answers to tell."""
    plain = [turn.stats[PLAIN] for turn in turns]
    rates = [each.decode_tokens_per_second for each in plain if each.decode_tokens >= _MIN_ANSWER_TOKENS]
    if len(rates) < _MIN_ANSWERS:
        return 1.0
    low, high = (float(value) for value in np.percentile(rates, (25, 75)))
    return high / low


def _interval_text(estimate: Estimate) -> str:
    return "" if estimate.interval is None else " (95 % interval {:.2f} to {:.2f})".format(*estimate.interval)
