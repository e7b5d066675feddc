"""The host's time of rounds whose passes run, for replays whose passes are charged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgerun.edge.bench.ratios import PLAIN
from edgerun.runtime.result import Stats
from replay_results import ConversationResult


@dataclass(frozen=True)
class HostFactors:
    """What the host's time of rounds whose passes were charged is multiplied by."""

    plain: float = 1.0
    """In plain decoding."""
    drafting: float = 1.0
    """In all other modes."""

    def applied(self, results: Sequence[ConversationResult]) -> list[ConversationResult]:
        """The results with the host's time multiplied."""
        return [
            replace(
                each,
                measured=[
                    replace(
                        turn,
                        stats={
                            mode: _scaled(stats, self.plain if mode == PLAIN else self.drafting)
                            for mode, stats in turn.stats.items()
                        },
                    )
                    for turn in each.measured
                ],
            )
            for each in results
        ]

    def __str__(self) -> str:
        return f"host's time of plain decoding times {self.plain:.3f}, with drafts times {self.drafting:.3f}"


class RealHost:
    """Host times of validated conversations, kept in a file: mean seconds of a round by recording, turn and mode.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rounds: dict[str, dict[str, list[float]]] = (
            json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        )

    def keep(self, recording: str, results: Sequence[ConversationResult]) -> None:
        """Keep the host times of conversations whose passes ran."""
        self._rounds[recording] = {
            f"{result.conversation} {turn.turn} {mode}": [host_s(stats), stats.decode_passes]
            for result in results
            for turn in result.measured
            for mode, stats in turn.stats.items()
            if stats.decode_passes
        }
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._rounds), encoding="utf-8")
        part.replace(self._path)

    def factors(self, recording: str, results: Sequence[ConversationResult]) -> HostFactors:
        """How much longer the host takes where passes run: over the same turns of the same conversations."""
        kept = self._rounds.get(recording, {})
        sums = {True: [0.0, 0.0], False: [0.0, 0.0]}
        for result in results:
            for turn in result.measured:
                for mode, stats in turn.stats.items():
                    found = kept.get(f"{result.conversation} {turn.turn} {mode}")
                    if found is not None and stats.decode_passes:
                        real, passes = found
                        both = sums[mode == PLAIN]
                        both[0] += real
                        both[1] += passes * host_s(stats) / stats.decode_passes
        plain, drafting = (real / charged if charged else 1.0 for real, charged in (sums[True], sums[False]))
        return HostFactors(plain, drafting)


def host_s(stats: Stats) -> float:
    """Seconds of an answer, after its first token, that are neither the target's nor the draft model's."""
    return max(stats.decode_s - stats.target_s - stats.draft_s, 0.0)


def _scaled(stats: Stats, factor: float) -> Stats:
    return replace(stats, total_s=stats.total_s + (factor - 1) * host_s(stats))
