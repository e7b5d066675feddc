"""Which parts a draft of the target's own layers should do without: agreement against time.

What a choice is worth is the expected tokens a second of a chain of guesses (`head_size.speed`), from how often the
draft agrees with the target and what its step takes. Agreement is not additive in the parts, so it is searched for:
parts are put in order by what each alone costs in agreement for the time it saves, the best beginning of that order is
where the search starts, and from there single parts are left out, taken back or exchanged as long as that helps (local
search as in SWIFT, Xia et al. 2025; exchange as in EvoPress, Sieberling et al. 2025).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from .head_size import speed
from .skipped_layers import SubLayer

_BEGINNINGS: Final = 16
"""How many beginnings of the order are tried, at most."""
_STALE: Final = 2
"""The search ends after so many failures in a row for every part there is."""
_EXCHANGE: Final = 0.5
"""Share of changes that exchange a part for another."""


@dataclass(frozen=True)
class PartTimes:
    """What passes take, in seconds."""

    target: Mapping[int, float]
    """The whole target's by rows, `head_size.TARGET_ROWS`."""
    part: Mapping[SubLayer, float]
    """What a step is shorter without a part."""

    def step(self, skipped: Collection[SubLayer]) -> float:
        """A step without some parts."""
        return max(self.target[1] - sum(self.part[part] for part in skipped), self.target[1] / 1000)


@dataclass(frozen=True)
class Choice:
    """Some parts to do without, and what is expected of that."""

    skipped: frozenset[SubLayer]
    agreement: float
    """Share of positions where draft and target prefer the same token."""
    speed: float
    """Tokens a second."""


class LayerSearch:
    """Looks for the parts to do without.

    Args:
        agreement: of a choice; takes long.
        times: of the parts, which are all that may be left out, at least one.
        seed: of the changes that are tried.
        deadline: the search ends at this `time.monotonic()`, but not before one choice was judged.
        progress: hears how many choices were judged.
    """

    def __init__(
        self,
        agreement: Callable[[Collection[SubLayer]], float],
        times: PartTimes,
        *,
        seed: int = 0,
        deadline: float = float("inf"),
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._agreement = agreement
        self._times = times
        self._parts = sorted(times.part)
        self._random = np.random.default_rng(seed)
        self._deadline = deadline
        self._progress = progress
        self._judged: dict[frozenset[SubLayer], Choice] = {}

    @property
    def judged(self) -> int:
        """Choices that were judged."""
        return len(self._judged)

    def best(self) -> Choice:
        """The best choice found; it leaves out something."""
        best = self._better(self._singles(), None)
        best = self._better(self._beginnings(), best)
        stale = 0
        while stale < _STALE * len(self._parts) and not self._over():
            found = self._better([self._changed(best.skipped)], best)
            stale = stale + 1 if found is best else 0
            best = found
        return best

    def _singles(self) -> list[frozenset[SubLayer]]:
        return [frozenset({part}) for part in self._parts]

    def _beginnings(self) -> list[frozenset[SubLayer]]:
        """The first of the parts in their order, of several lengths."""

        def price(part: SubLayer) -> float:
            known = self._judged.get(frozenset({part}))
            lost = 1.0 if known is None else 1 - known.agreement
            return lost / max(self._times.part[part], 1e-12)

        order = sorted(self._parts, key=price)
        lengths = np.unique(np.linspace(1, len(order), min(_BEGINNINGS, len(order))).round().astype(int))
        return [frozenset(order[:length]) for length in lengths.tolist()]

    def _changed(self, skipped: frozenset[SubLayer]) -> frozenset[SubLayer]:
        """A choice that differs by one part, or by one exchanged for another."""
        out, kept = sorted(skipped), [part for part in self._parts if part not in skipped]
        exchange = self._random.random() < _EXCHANGE
        takes_back = bool(self._random.integers(2))
        changed = set(skipped)
        if kept and (exchange or not takes_back or len(out) == 1):
            changed.add(self._drawn(kept))
        if len(out) > 1 - exchange and (exchange or takes_back):
            changed.discard(self._drawn(out))
        return frozenset(changed) or skipped

    def _drawn(self, parts: Sequence[SubLayer]) -> SubLayer:
        return parts[int(self._random.integers(len(parts)))]

    def _better(self, choices: Sequence[frozenset[SubLayer]], best: Choice | None) -> Choice:
        """The best of some choices, if it is better than the best so far."""
        for skipped in choices:
            if best is not None and self._over():
                return best
            if skipped not in self._judged:
                agreement = self._agreement(skipped)
                rate = speed(agreement, self._times.step(skipped), self._times.target)
                self._judged[skipped] = Choice(skipped, agreement, rate)
                self._progress(len(self._judged))
            found = self._judged[skipped]
            if best is None or found.speed > best.speed:
                best = found
        if best is None:
            raise ValueError("there is no part that may be left out")
        return best

    def _over(self) -> bool:
        return time.monotonic() > self._deadline
