"""Search of the sub-layers that a layer-skip draft skips: agreement against time.

The objective is the expected number of tokens per second of a draft chain (`head_size.tokens_per_second`), from the
agreement of the draft with the target and the time of its step. Agreement is not additive in the sub-layers, so it is
searched for: the sub-layers are ordered by the agreement that each alone costs for the time it saves, the best prefix
of that order is the start, and a local search adds, removes or exchanges single sub-layers as long as that helps (as in
SWIFT, Xia et al. 2025; exchange as in EvoPress, Sieberling et al. 2025).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from .head_size import tokens_per_second
from .skipped_layers import SubLayer

_MAX_PREFIXES: Final = 16
"""Largest number of prefixes of the order that are measured."""
_PATIENCE: Final = 2
"""The search ends after so many failures in a row for each sub-layer."""
_EXCHANGE_SHARE: Final = 0.5
"""Share of changes that exchange a sub-layer for another."""


@dataclass(frozen=True)
class SubLayerTimes:
    """Seconds of passes and sub-layers."""

    target: Mapping[int, float]
    """Seconds of the target's passes by their widths, for `head_size.TARGET_WIDTHS`."""
    saved: Mapping[SubLayer, float]
    """Seconds that skipping a sub-layer saves in a step."""

    def step(self, skipped: Collection[SubLayer]) -> float:
        """Seconds of a step that skips some sub-layers."""
        return max(self.target[1] - sum(self.saved[each] for each in skipped), self.target[1] / 1000)


@dataclass(frozen=True)
class SkipChoice:
    """Sub-layers to skip, and the expected result."""

    skipped: frozenset[SubLayer]
    agreement: float
    """Share of positions where draft and target prefer the same token."""
    tokens_per_second: float


class SkipSearch:
    """Search of the sub-layers to skip.

    Args:
        agreement: Measures the agreement of a choice; slow.
        times: Times of the sub-layers that may be skipped, at least one.
        seed: Seed of the changes that are tried.
        deadline: Value of `time.monotonic` at which the search ends, but not before one choice was measured.
        progress: Receives the number of measured choices.
    """

    def __init__(
        self,
        agreement: Callable[[Collection[SubLayer]], float],
        times: SubLayerTimes,
        *,
        seed: int = 0,
        deadline: float = float("inf"),
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._agreement = agreement
        self._times = times
        self._sub_layers = sorted(times.saved)
        self._generator = np.random.default_rng(seed)
        self._deadline = deadline
        self._progress = progress
        self._measured: dict[frozenset[SubLayer], SkipChoice] = {}

    @property
    def measured(self) -> int:
        """Number of measured choices."""
        return len(self._measured)

    def best(self) -> SkipChoice:
        """Run the search; the result skips at least one sub-layer."""
        best = self._better([frozenset({each}) for each in self._sub_layers], None)
        best = self._better(self._prefixes(), best)
        failures = 0
        while failures < _PATIENCE * len(self._sub_layers) and not self._is_late():
            found = self._better([self._changed(best.skipped)], best)
            failures = failures + 1 if found is best else 0
            best = found
        return best

    def _prefixes(self) -> list[frozenset[SubLayer]]:
        """Prefixes of several lengths of the sub-layers, ordered by lost agreement per saved time."""

        def loss_rate(sub_layer: SubLayer) -> float:
            known = self._measured.get(frozenset({sub_layer}))
            lost = 1.0 if known is None else 1 - known.agreement
            return lost / max(self._times.saved[sub_layer], 1e-12)

        order = sorted(self._sub_layers, key=loss_rate)
        lengths = np.unique(np.linspace(1, len(order), min(_MAX_PREFIXES, len(order))).round().astype(int))
        return [frozenset(order[:length]) for length in lengths.tolist()]

    def _changed(self, skipped: frozenset[SubLayer]) -> frozenset[SubLayer]:
        """A random choice that adds or removes one sub-layer, or exchanges one for another."""
        out, kept = sorted(skipped), [each for each in self._sub_layers if each not in skipped]
        exchange = self._generator.random() < _EXCHANGE_SHARE
        removes = bool(self._generator.integers(2))
        changed = set(skipped)
        if kept and (exchange or not removes or len(out) == 1):
            changed.add(self._random(kept))
        if len(out) > 1 - exchange and (exchange or removes):
            changed.discard(self._random(out))
        return frozenset(changed) or skipped

    def _random(self, sub_layers: Sequence[SubLayer]) -> SubLayer:
        return sub_layers[int(self._generator.integers(len(sub_layers)))]

    def _better(self, choices: Sequence[frozenset[SubLayer]], best: SkipChoice | None) -> SkipChoice:
        """Measure choices; the best of them, if it is better than the best so far."""
        for skipped in choices:
            if best is not None and self._is_late():
                return best
            if skipped not in self._measured:
                agreement = self._agreement(skipped)
                speed = tokens_per_second(agreement, self._times.step(skipped), self._times.target)
                self._measured[skipped] = SkipChoice(skipped, agreement, speed)
                self._progress(len(self._measured))
            found = self._measured[skipped]
            if best is None or found.tokens_per_second > best.tokens_per_second:
                best = found
        if best is None:
            raise ValueError("no sub-layer may be skipped")
        return best

    def _is_late(self) -> bool:
        return time.monotonic() > self._deadline
