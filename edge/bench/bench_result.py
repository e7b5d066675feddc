"""The result of a whole measurement: its conditions, every mode, and its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from ...errors import InputError
from ...runtime.measure.measurement_store import describe_machine
from ...runtime.measure.system_load import LoadMeter
from ...runtime.result import Stats
from ...runtime.speculation.choice import SOURCE_NAMES
from ...runtime.speculation.tree import Source
from .ratios import (
    MIN_CONVERSATIONS,
    PLAIN,
    MeasuredTurn,
    ModeResult,
    compare_modes,
    round_ms,
    rounded,
    spread_of_plain,
)

REPLAY_NOTE: Final = (
    "Replay: the tokens are those of a recording. Every pass over the weights counts at its full cost, and draft "
    "tokens were accepted where they match the recorded answers."
)
SPEED_NOTE: Final = (
    "Speeds are decoding rates after the first token, without prefill. Ratios compare with plain decoding in the same "
    "run; brackets are 95 % confidence intervals over conversations, given where every category has at least three."
)
BUSY_NOTE: Final = "Other programs used the processor during the measurement: all numbers may be off."
_MIN_TOKENS: Final = 100
"""Fewest tokens after the first one, of all answers of a mode, that give a ratio."""
_MAX_SPREAD: Final = 1.5
"""Ratio of the quartiles of plain decoding's rates above which the machine was not steady."""
_LEARNING: Final = SOURCE_NAMES[Source.RECYCLE]


@dataclass(frozen=True)
class BenchConditions:
    """What the numbers hold for."""

    model: str
    draft: str | None
    device: str
    threads: int | None
    context: int
    source: str
    """Where the prompts or the recording come from."""
    replay: bool
    max_tokens: int
    turns: str
    temperature: float
    conversations: int

    def to_json(self, benchmark: str, others: float | None, *, busy: bool) -> dict[str, Any]:
        """The name of a measurement, its conditions, the machine and the load of that, as plain values."""
        return {
            "benchmark": benchmark,
            **asdict(self),
            "machine": describe_machine(),
            "processors_used_by_others": None if others is None else round(others, 2),
            "busy": busy,
        }


@dataclass(frozen=True)
class BenchResult:
    """A measurement of at least one mode besides plain decoding."""

    conditions: BenchConditions
    modes: Sequence[ModeResult]
    plain: Stats
    shortened: int = 0
    """Number of prompts that were shortened to fit the context."""
    others: float | None = None
    """Mean number of processors that other programs used meanwhile; None where the system does not tell it."""
    busy: bool = False
    """Whether they took processors that the measurement needed."""
    plain_spread: float = 1.0
    """Upper quartile of the rates of plain decoding's answers over the lower one."""

    @classmethod
    def of(cls, measured: Sequence[MeasuredTurn], conditions: BenchConditions, meter: LoadMeter) -> BenchResult:
        """Compare the modes; `meter` ran during the measurement.

        Raises:
            InputError: no answer is long enough to have a rate.
        """
        comparable = [turn for turn in measured if turn.comparable]
        if not comparable:
            raise InputError("no answer had a second token", "give other prompts, more --max-tokens, or --turns all")
        return cls(
            conditions=conditions,
            modes=compare_modes(comparable),
            plain=Stats.total(turn.stats[PLAIN] for turn in comparable),
            shortened=sum(turn.shortened for turn in measured),
            others=meter.others(),
            busy=meter.is_busy,
            plain_spread=spread_of_plain(comparable),
        )

    @property
    def stats(self) -> dict[str, Stats]:
        """Statistics of plain decoding and of every mode, by name."""
        return {PLAIN: self.plain, **{mode.name: mode.stats for mode in self.modes}}

    @property
    def headlines(self) -> list[str]:
        """A sentence for every mode: its ratio with the interval, or why there is none and what to do."""
        return [self._headline(mode) for mode in self.modes]

    def _headline(self, mode: ModeResult) -> str:
        if (reason := self.reason_without_ratio(mode)) is not None:
            return f"{mode.name}: no ratio, because {reason}"
        rate, plain = mode.stats.decode_tokens_per_second, mode.plain.decode_tokens_per_second
        interval = " (95 % interval {:.2f} to {:.2f})".format(*mode.mean.interval) if mode.mean.interval else ""
        return (
            f"{mode.name}: {mode.mean.value:.2f} times as fast as plain decoding{interval}, "
            f"{rate:.1f} and {plain:.1f} tokens a second"
        )

    def reason_without_ratio(self, mode: ModeResult) -> str | None:
        """Why the ratio of a mode says nothing, and what to do; None if it does."""
        tokens = min(mode.stats.decode_tokens, mode.plain.decode_tokens)
        if not mode.stats.drafted:
            return (
                "no draft token was verified: both modes did the same. Give prompts like those you use (--prompts), "
                "longer answers (--max-tokens) or a draft model (--draft)"
            )
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
        if self.busy:
            used = "" if self.others is None else f" (they used {self.others:.1f} processors on average)"
            return f"other programs used the processor meanwhile{used}. Close them and measure again"
        if self.plain_spread > _MAX_SPREAD:
            return (
                f"the machine was not steady: of the answers of plain decoding, the faster ones ran at "
                f"{self.plain_spread:.1f} times the speed of the slower ones. Measure again when nothing else runs"
            )
        return None

    @property
    def notes(self) -> list[str]:
        """What a reader has to know beside the numbers."""
        notes = [REPLAY_NOTE] if self.conditions.replay else []
        notes.append(SPEED_NOTE)
        if not self.conditions.replay:
            for mode in self.modes:
                total = mode.stats.answers
                notes.append(f"{mode.name}: {total - mode.differing} of {total} texts equal those of plain decoding.")
        if sum(_LEARNING in mode.stats.by_source for mode in self.modes) > 1:
            notes.append(
                f"The drafter {_LEARNING} learns from every answer. Where several modes use it, each has also learned "
                "from the other modes' answers to the same prompts; measure one mode a run to compare them."
            )
        if self.shortened:
            notes.append(f"{self.shortened} prompts were shortened to fit the context.")
        if self.busy:
            notes.append(BUSY_NOTE)
        return notes

    def to_json(self) -> dict[str, Any]:
        """This result as plain values."""
        conditions = self.conditions
        return {
            **conditions.to_json("speculation", self.others, busy=self.busy),
            "max_tokens": min(conditions.max_tokens, conditions.context),
            "headlines": {mode.name: self._headline_json(mode) for mode in self.modes},
            "shortened_prompts": self.shortened,
            "plain": rounded(
                {
                    "tokens_per_second": self.plain.decode_tokens_per_second,
                    "pass_ms": round_ms(self.plain)["total"],
                }
            ),
            "modes": {mode.name: mode.to_json() for mode in self.modes},
        }

    def _headline_json(self, mode: ModeResult) -> dict[str, Any]:
        """The ratio of a mode with its interval, or the reason why there is none, as plain values."""
        reason, mean = self.reason_without_ratio(mode), mode.mean
        ratio, interval = (None, None) if reason is not None else rounded((mean.value, mean.interval))
        return {"ratio": ratio, "interval": interval, "reason": reason}
