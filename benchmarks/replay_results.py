"""Measured turns of a replay, kept on disk conversation by conversation, so that a measurement can be resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from edgerun.edge.bench.ratios import PLAIN, MeasuredTurn, ModeResult, compare_modes
from edgerun.runtime.result import DraftCounts, Stats
from edgerun.runtime.sampling.logprobs import LogprobTotals

_FASTER = "as it is"
"""Name of what is compared with another mode or variant, which takes the place of plain decoding."""


@dataclass(frozen=True)
class ConversationResult:
    """What one variant of the engine measured of one conversation."""

    variant: str
    conversation: int
    """Index of the conversation."""
    measured: Sequence[MeasuredTurn]


class ResultFile:
    """A file with a line for each conversation and variant.

    Args:
        folder: where results are kept.
        name: beginning of the file's name, for people.
        settings: everything that the numbers depend on; other settings have another file.
    """

    def __init__(self, folder: Path, name: str, settings: Mapping[str, object]) -> None:
        key = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:12]
        self._path = folder / f"{name}-{key}.jsonl"
        folder.mkdir(parents=True, exist_ok=True)

    def read(self) -> list[ConversationResult]:
        """All whole lines; the last one is not whole if a run was interrupted while it was written."""
        if not self._path.is_file():
            return []
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [_result_from(json.loads(line)) for line in lines if line.endswith("\n")]

    def append(self, result: ConversationResult) -> None:
        """Add the result of one conversation."""
        row = {
            "variant": result.variant,
            "conversation": result.conversation,
            "turns": [_turn_json(turn) for turn in result.measured],
        }
        self._drop_unfinished_line()
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _drop_unfinished_line(self) -> None:
        content = self._path.read_bytes() if self._path.is_file() else b""
        if content and not content.endswith(b"\n"):
            self._path.write_bytes(content[: content.rfind(b"\n") + 1])


def gain(results: Sequence[ConversationResult], base: tuple[str, str], other: tuple[str, str]) -> ModeResult | None:
    """Speed of a variant and mode compared with that of another variant, or another mode, over the same turns.

    Returns:
        The ratio by category and over all, with 95 % intervals over conversations; None if no turn is comparable.
    """
    turns = {
        name: {
            (turn.conversation, turn.turn): turn
            for result in results
            if result.variant == name
            for turn in result.measured
        }
        for name in {base[0], other[0]}
    }
    paired = [
        MeasuredTurn(
            turn.category,
            turn.conversation,
            turn.turn,
            {PLAIN: turns[other[0]][place].stats[other[1]], _FASTER: turn.stats[base[1]]},
        )
        for place, turn in turns[base[0]].items()
        if place in turns[other[0]]
    ]
    return next(iter(compare_modes(paired)), None)


def _turn_json(turn: MeasuredTurn) -> dict[str, Any]:
    stats = {mode: asdict(replace(each, rounds=())) for mode, each in turn.stats.items()}
    return {**asdict(replace(turn, stats={})), "differing": sorted(turn.differing), "stats": stats}


def _result_from(row: Mapping[str, Any]) -> ConversationResult:
    turns = [
        MeasuredTurn(
            **{
                **turn,
                "differing": frozenset(turn["differing"]),
                "stats": {mode: _stats_from(stats) for mode, stats in turn["stats"].items()},
            }
        )
        for turn in row["turns"]
    ]
    return ConversationResult(row["variant"], row["conversation"], turns)


def _stats_from(row: Mapping[str, Any]) -> Stats:
    return Stats(
        **{
            **row,
            "by_source": {name: DraftCounts(**counts) for name, counts in row["by_source"].items()},
            "by_depth": tuple(DraftCounts(**counts) for counts in row["by_depth"]),
            "rounds": (),
            "logprob_totals": LogprobTotals(*row.get("logprob_totals", ())),
        }
    )
