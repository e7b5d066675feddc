"""The whole of a measurement: what it holds for, every contender's account, and its JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ...errors import InputError
from ...runtime.engine import Engine
from ...runtime.measure.machine import machine
from ...runtime.speculation.choice import SOURCE_NAMES
from ...runtime.speculation.tree import Source
from .ratios import PLAIN, Account, Run, accounts, as_mapping
from .runner import Findings

REPLAY_NOTE: Final = (
    "Replay: the tokens are those of a recording. Every pass over the weights was run at its full cost, and guesses "
    "were accepted as they would have been when the recorded answers were written."
)
SPEED_NOTE: Final = (
    "Speed is that of writing, after the first token; reading the prompt is left out. Ratios are to plain decoding in "
    "the same run; brackets hold the 95 % interval over conversations, where every category has at "
    "least three."
)
_LEARNING: Final = SOURCE_NAMES[Source.RECYCLED]
_BUSY: Final = 0.7
_CURVE_ROWS: Final = 16


@dataclass(frozen=True)
class Conditions:
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
    """Tokens of the draft's head, where it was trimmed."""

    @property
    def draft_shown(self) -> str:
        """The draft and its head, in words; empty without one."""
        if not self.draft:
            return ""
        return self.draft if self.draft_head is None else f"{self.draft} with a head of {self.draft_head} tokens"


@dataclass(frozen=True)
class Result:
    """A measurement, at least one account."""

    conditions: Conditions
    accounts: Sequence[Account]
    plain: Run
    step_cost_ms: Sequence[float] = ()
    """Milliseconds of a pass over 1, 2, ... rows, as this run found them."""
    step_cost_context: int = 0
    """Tokens before those passes."""
    cut: int = 0
    """Prompts that were shortened to fit the context."""
    load: float | None = None
    """Programs that wanted a core in the minute before."""
    machine: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Findings, conditions: Conditions, engine: Engine, busy: float | None) -> Result:
        """What was found, with the step cost that the engine knows by now; `busy` is the machine's load before.

        Raises:
            InputError: no answer was long enough to say anything.
        """
        counted = [trial for trial in found.trials if trial.counts]
        if not counted:
            raise InputError("no answer had a second token", "give other prompts, more --max-tokens, or --turns all")
        context = round(statistics.median(trial.context for trial in counted))
        cost = engine.model.drafters.pass_cost().curve(context, _CURVE_ROWS)
        return cls(
            conditions=conditions,
            accounts=accounts(counted),
            plain=Run.total(trial.runs[PLAIN] for trial in counted),
            step_cost_ms=[1e3 * float(seconds) for seconds in cost],
            step_cost_context=context,
            cut=found.cut,
            load=busy,
            machine=machine(),
        )

    @property
    def notes(self) -> list[str]:
        """What a reader has to know beside the numbers."""
        notes = [REPLAY_NOTE] if self.conditions.replay else []
        notes.append(SPEED_NOTE)
        if not self.conditions.replay:
            for account in self.accounts:
                same = account.answers - account.differing
                notes.append(f"{account.name}: {same} of {account.answers} texts are plain decoding's.")
        if sum(_LEARNING in account.run.by_source for account in self.accounts) > 1:
            notes.append(
                f"{_LEARNING} learns from every answer, whoever drafted it: where several modes use it, each has also "
                "learned from the others' answers to the same prompts. Measure one mode a run to compare them."
            )
        if self.cut:
            notes.append(f"{self.cut} prompts were shortened to fit the context.")
        if self.load is not None and self.load > _BUSY:
            notes.append(
                f"The machine was busy before the measurement (load {self.load:.1f}): do not trust single ratios."
            )
        return notes

    def as_mapping(self) -> dict[str, Any]:
        """In plain values, for JSON."""
        conditions = self.conditions
        return {
            "benchmark": "speculation",
            "model": conditions.model,
            "draft": conditions.draft,
            "draft_head": conditions.draft_head,
            "device": conditions.device,
            "threads": conditions.threads,
            "context": conditions.context,
            "source": conditions.source,
            "replay": conditions.replay,
            "max_tokens": min(conditions.max_tokens, conditions.context),
            "turns": conditions.turns,
            "temperature": conditions.temperature,
            "conversations": conditions.conversations,
            "machine": dict(self.machine),
            "load_before": self.load,
            "cut_prompts": self.cut,
            "plain": {
                "tokens_per_second": float(f"{self.plain.rate:.5g}"),
                "pass_ms": float(f"{self.plain.each_pass_ms(self.plain.seconds):.5g}"),
            },
            "modes": {account.name: as_mapping(account) for account in self.accounts},
            "step_cost": {
                "context": self.step_cost_context,
                "ms": [float(f"{ms:.4g}") for ms in self.step_cost_ms],
            },
        }
