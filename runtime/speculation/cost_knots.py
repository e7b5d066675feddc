"""Estimated costs of the pass widths that were run, and curves through them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_CLIP: Final = 0.15
"""Limit of the difference that a single pass contributes, in log seconds."""
MAX_WEIGHT: Final = 20
"""Number of passes that a running estimate averages over at most."""
_FIRST_PASSES: Final = 7
"""Number of passes whose lower quartile replaces a doubtful estimate; later ones are averaged with it."""
_FEWEST_PASSES: Final = 3
"""Number of passes from which it does: of one or two, each may be a disturbed one."""
_DISAGREEMENT: Final = math.log(1.5)
"""Difference, in log seconds, from which passes contradict what was measured, if many in a row do."""


@dataclass
class Knot:
    """The estimate for one width: log seconds, and the number of passes it averages over."""

    log: float
    passes: int
    first: list[float] | None = None
    """Log seconds of the first passes, at the measured speed, which replace a doubtful estimate."""
    strays: int = 0
    """Number of passes in a row that contradict the estimate, negative if they were faster."""

    def learn(self, log: float, common: float = 0.0) -> float:
        """Learn from a pass; returns the change of the estimate.

        Args:
            log: what the pass took at the measured speed, in log seconds.
            common: mean of the `clipped` differences of passes of all widths. What they have in common tells nothing
                about this width.
        """
        before, residual = self.log, log - self.log
        if self.first is not None:
            self.first.append(log)
            if len(self.first) >= _FEWEST_PASSES:
                self.log, self.passes = sorted(self.first)[(len(self.first) - 1) // 4], len(self.first)
            if len(self.first) == _FIRST_PASSES:
                self.first = None
            return self.log - before
        self.strays = count_strays(self.strays, residual)
        self.passes = min(self.passes + 1, MAX_WEIGHT)
        self.log += (clipped(residual) - common) / self.passes
        return self.log - before

    def distrust(self) -> None:
        """Let the next passes replace the estimate."""
        self.passes, self.first, self.strays = 1, [], 0


def clipped(residual: float) -> float:
    """What a single pass contributes of its difference from an estimate, in log seconds."""
    return max(-_CLIP, min(_CLIP, residual))


def count_strays(strays: int, residual: float) -> int:
    """Count the passes in a row that were much slower, or as a negative number much faster."""
    if abs(residual) < _DISAGREEMENT:
        return 0
    return max(strays, 0) + 1 if residual > 0 else min(strays, 0) - 1


def interpolated(knots: Mapping[int, Knot], width: Any) -> Any:
    """Seconds at `width` (a number or an array): linear between the knots, which are first made not to fall.

    Beyond the last knot the slope of the upper half continues, which is less noisy than the last slope. If
    only width 1 is known, a pass over m tokens is assumed to cost m passes: no draft pays until more is known.
    """
    widths, times = _not_falling(knots)
    if len(widths) == 1:
        return times[0] * width
    half = min(bisect_left(widths, (widths[-1] + 1) // 2), len(widths) - 2)
    slope = (times[-1] - times[half]) / (widths[-1] - widths[half])
    return np.interp(width, widths, times) + slope * np.maximum(width - np.asarray(widths[-1]), 0)


def staircase(knots: Mapping[int, Knot], width: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Seconds at `width`: the cost of the next larger known width; beyond the last one, of several passes."""
    widths, known = _not_falling(knots)
    times = np.array(known)
    whole, rest = np.divmod(width - 1, widths[-1])
    seconds: npt.NDArray[np.float64] = whole * times[-1] + times[np.searchsorted(widths, rest + 1)]
    return seconds


def _not_falling(knots: Mapping[int, Knot]) -> tuple[list[int], list[float]]:
    """The widths, and the nearest seconds that never fall, by weighted least squares (pool adjacent violators)."""
    pools: list[tuple[float, int, int]] = []
    for width in sorted(knots):
        pool = (math.exp(knots[width].log), knots[width].passes, 1)
        while pools and pools[-1][0] > pool[0]:
            below = pools.pop()
            total = below[1] + pool[1]
            pool = ((below[0] * below[1] + pool[0] * pool[1]) / total, total, below[2] + pool[2])
        pools.append(pool)
    return sorted(knots), [value for value, _, count in pools for _ in range(count)]
