"""The result of a whole measurement: its conditions, every mode, and its JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from ...errors import InputError
from ...runtime.engine import Engine
from ...runtime.measure.measurement_store import describe_machine
from ...runtime.measure.system_load import LoadMeter
from ...runtime.result import Stats
from ...runtime.speculation.choice import SOURCE_NAMES
from ...runtime.speculation.tree import Source
from .ratios import (
    PLAIN,
    MachineLoad,
    ModeResult,
    RoundTimes,
    compare_modes,
    headline,
    reason_without_ratio,
    spread_of_plain,
)
from .runner import Measurements

REPLAY_NOTE: Final = (
    "Replay: the tokens are those of a recording. Every pass over the weights counts at its full cost, and draft "
    "tokens were accepted where they match the recorded answers."
)
SPEED_NOTE: Final = (
    "Speeds are decoding rates after the first token, without prefill. Ratios compare with plain decoding in the same "
    "run; brackets are 95 % confidence intervals over conversations, given where every category has at least three."
)
BUSY_NOTE: Final = "Other programs used the processor during the measurement: all numbers may be off."
_LEARNING: Final = SOURCE_NAMES[Source.RECYCLED]
_COST_WIDTH: Final = 16
"""Widest pass whose cost is reported, in tokens."""


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
    draft_head: int | None = None
    """Number of tokens in the LM head of the draft model, if it was trimmed."""

    @property
    def draft_shown(self) -> str:
        """The draft model and its head in words; empty without a draft model."""
        if not self.draft:
            return ""
        return self.draft if self.draft_head is None else f"{self.draft} (head of {self.draft_head} tokens)"


@dataclass(frozen=True)
class BenchResult:
    """A measurement of at least one mode besides plain decoding."""

    conditions: BenchConditions
    modes: Sequence[ModeResult]
    plain: Stats
    pass_cost_ms: Sequence[float] = ()
    """Milliseconds of a pass over 1, 2, ... tokens on this machine."""
    pass_cost_context: int = 0
    """Number of tokens in the cache during those passes."""
    shortened: int = 0
    """Number of prompts that were shortened to fit the context."""
    load: MachineLoad = field(default_factory=MachineLoad)
    machine: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, measured: Measurements, conditions: BenchConditions, engine: Engine, meter: LoadMeter) -> BenchResult:
        """Compare the modes, and take the pass cost from the engine; `meter` ran during the measurement.

        Raises:
            InputError: no answer is long enough to have a rate.
        """
        comparable = [turn for turn in measured.turns if turn.comparable]
        if not comparable:
            raise InputError("no answer had a second token", "give other prompts, more --max-tokens, or --turns all")
        context = round(statistics.median(turn.context for turn in comparable))
        cost = engine.drafters.pass_cost().curve(context, _COST_WIDTH)
        return cls(
            conditions=conditions,
            modes=compare_modes(comparable),
            plain=Stats.total(turn.stats[PLAIN] for turn in comparable),
            pass_cost_ms=[1e3 * float(seconds) for seconds in cost],
            pass_cost_context=context,
            shortened=measured.shortened,
            load=MachineLoad(meter.others(), meter.is_busy, spread_of_plain(comparable)),
            machine=describe_machine(),
        )

    @property
    def stats(self) -> dict[str, Stats]:
        """Statistics of plain decoding and of every mode, by name."""
        return {PLAIN: self.plain, **{mode.name: mode.stats for mode in self.modes}}

    @property
    def headlines(self) -> list[str]:
        """A sentence for every mode: its ratio, or why there is none."""
        return [headline(mode, self.load) for mode in self.modes]

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
        if self.load.busy:
            notes.append(BUSY_NOTE)
        return notes

    def to_json(self) -> dict[str, Any]:
        """This result as plain values."""
        conditions = self.conditions
        return {
            "benchmark": "speculation",
            **asdict(conditions),
            "max_tokens": min(conditions.max_tokens, conditions.context),
            "machine": dict(self.machine),
            "processors_used_by_others": None if self.load.others is None else round(self.load.others, 2),
            "busy": self.load.busy,
            "headlines": {mode.name: self._headline_json(mode) for mode in self.modes},
            "shortened_prompts": self.shortened,
            "plain": {
                "tokens_per_second": float(f"{self.plain.decode_tokens_per_second:.5g}"),
                "pass_ms": float(f"{RoundTimes.of(self.plain).total:.5g}"),
            },
            "modes": {mode.name: mode.to_json() for mode in self.modes},
            "pass_cost": {
                "context": self.pass_cost_context,
                "ms": [float(f"{ms:.4g}") for ms in self.pass_cost_ms],
            },
        }

    def _headline_json(self, mode: ModeResult) -> dict[str, Any]:
        """The ratio of a mode with its interval, or the reason why there is none, as plain values."""
        reason, described = reason_without_ratio(mode, self.load), mode.to_json()
        if reason is not None:
            return {"ratio": None, "interval": None, "reason": reason}
        return {"ratio": described["geometric_mean"], "interval": described["interval"], "reason": None}
