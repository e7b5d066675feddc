"""t(m): what a target pass over m rows costs on this machine, at the context it is run at.

Several rows a pass only pay where they cost less than several passes, and how much less is a matter of kernel, weights
and memory bus, with steps that no formula has. So t(m) is measured (`calibration`), and refined by every pass that is
run. A machine also changes speed as a whole, when it gets hot or busy; that is kept apart from the curve's shape, or a
slow minute at one width would look as if the others had become cheap.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...models.json_file import is_finite, is_whole

MOST_WIDTH: Final = 256
"""Rows of the widest pass that is observed; prompts are run wider and say nothing about drafts."""
BUCKET_ENDS: Final = (512, 2048, 8192, 32768, 131072)
"""Attention reads the whole context, so t(m) is kept apart for contexts up to each of these, and beyond the last."""

_WINDOW: Final = 15
_MIDDLE: Final = _WINDOW // 2
_CLIP: Final = 0.15
"""The most a single pass is believed to differ, in log seconds."""
_TRUSTED: Final = 20
"""Passes after which an estimate moves no slower: the memory of the running estimate."""
_ASSUMED: Final = 4
"""Passes that an estimate made from its neighbours counts for."""
TOLERANCE: Final = 0.02
"""Log seconds that the speed may move before curves follow: less than decides anything."""
_SHAPE_TOLERANCE: Final = 0.06
"""What the widths' estimates may move, all together, before a curve is made again, which takes 50 us."""


@dataclass
class _Knot:
    """The estimate for one width: log seconds, and the passes behind it."""

    log: float
    passes: int

    def learn(self, residual: float) -> float:
        """Take in one pass that took `residual` log seconds more; returns how far the estimate moved."""
        self.passes = min(self.passes + 1, _TRUSTED)
        moved = max(-_CLIP, min(_CLIP, residual)) / self.passes
        self.log += moved
        return moved


@dataclass
class _Bucket:
    """The estimates for contexts of one size. `arrivals` collects the first passes of one that was not measured."""

    knots: dict[int, _Knot]
    arrivals: list[float] | None = None
    moved: float = 0.0

    def inherited(self) -> _Bucket:
        """A bucket of the same shape whose own level is not known yet."""
        return _Bucket({width: _Knot(knot.log, _ASSUMED) for width, knot in self.knots.items()}, [])


class _Pass(NamedTuple):
    bucket: int
    rows: int
    residual: float


class PassCost:
    """Seconds of a pass by rows and context: positive, and never falling in rows.

    `log t = speed + shape[bucket][m]`. The speed is the median residual of the last 15 passes of any width. The shape
    learns from the pass in the middle of those 15, measured against their median: with as many passes before as after,
    a change of speed moves the speed alone. Each pass moves the shape by a clipped share, so one that was disturbed
    does little harm.
    """

    def __init__(self, measured: Mapping[int, Mapping[int, float]]) -> None:
        """Start from measurements: context -> rows -> seconds; one context a bucket, one row among the rows.

        Raises:
            ValueError: nothing was measured, or a bucket twice or without one row, or something that is no time.
        """
        self._buckets: dict[int, _Bucket] = {}
        for context, times in measured.items():
            index = _bucket_of(context)
            if index in self._buckets or 1 not in times:
                raise ValueError(f"context {context} was measured twice, or not with one row")
            for rows, seconds in times.items():
                if not 1 <= rows <= MOST_WIDTH or not 0 < seconds < math.inf:
                    raise ValueError(f"{seconds} s for {rows} rows")
            knots = {rows: _Knot(math.log(times[rows]), _TRUSTED) for rows in sorted(times)}
            self._buckets[index] = _Bucket(knots)
        if not self._buckets:
            raise ValueError("no pass was measured")
        self._speed = 0.0
        self._recent = deque((_Pass(-1, 1, 0.0) for _ in range(_WINDOW)), _WINDOW)
        self._curves: dict[int, npt.NDArray[np.float64]] = {}
        self.observed = 0
        """Passes taken in since it was made: whether saving it is worth anything."""

    @property
    def measured(self) -> dict[int, dict[int, float]]:
        """Seconds by the end of the context bucket and rows, of those widths that were run; at the present speed."""
        return {
            _end_of(index): {rows: math.exp(knot.log + self._speed) for rows, knot in sorted(bucket.knots.items())}
            for index, bucket in sorted(self._buckets.items())
            if bucket.arrivals is None
        }

    def seconds(self, rows: int, context: int) -> float:
        """Seconds of a pass over `rows` rows after `context` committed ones."""
        return float(self.curve(context, rows)[rows - 1])

    def curve(self, context: int, most_rows: int) -> npt.NDArray[np.float64]:
        """Seconds of passes over 1 to `most_rows` rows, float64 `[most_rows]`, read-only."""
        index = _bucket_of(context)
        curve = self._curves.get(index)
        if curve is None or curve.size < most_rows:
            if most_rows < 1:
                raise ValueError(f"a pass has at least one row, not {most_rows}")
            curve = self._curves[index] = self._make_curve(index, max(most_rows, 32))
        return curve[:most_rows]

    def observe(self, rows: int, context: int, seconds: float) -> None:
        """Take in that a pass over `rows` rows after `context` committed ones took `seconds`."""
        if not 1 <= rows <= MOST_WIDTH or not 0 < seconds < math.inf:
            return
        self.observed += 1
        index = _bucket_of(context)
        bucket = self._buckets.get(index)
        if bucket is None:
            bucket = self._buckets[index] = self._nearest(index).inherited()
        knot = bucket.knots.get(rows)
        if knot is None:
            knot = bucket.knots[rows] = _Knot(math.log(_interpolated(bucket.knots, rows)), _ASSUMED)
        residual = math.log(seconds) - knot.log
        if bucket.arrivals is not None:
            self._settle(index, bucket, residual - self._speed)
            return
        self._recent.append(_Pass(index, rows, residual))
        middle = sorted(entry.residual for entry in self._recent)[_MIDDLE]
        if abs(middle - self._speed) > TOLERANCE:
            self._change_speed(middle)
        self._shape(self._recent[_MIDDLE], middle)

    def _change_speed(self, speed: float) -> None:
        factor = math.exp(speed - self._speed)
        self._curves = {index: _frozen(curve * factor) for index, curve in self._curves.items()}
        self._speed = speed

    def _shape(self, seen: _Pass, speed: float) -> None:
        """What the speed around a pass does not explain belongs to its width."""
        bucket = self._buckets.get(seen.bucket)
        if bucket is None:
            return
        bucket.moved += abs(bucket.knots[seen.rows].learn(seen.residual - speed))
        if bucket.moved > _SHAPE_TOLERANCE:
            bucket.moved = 0.0
            self._curves.clear()

    def _settle(self, index: int, bucket: _Bucket, residual: float) -> None:
        """The first passes in a bucket that was not measured say how much slower it is than its neighbour."""
        assert bucket.arrivals is not None  # noqa: S101  the caller asked
        bucket.arrivals.append(residual)
        self._curves.pop(index, None)
        if len(bucket.arrivals) > _MIDDLE:
            level = _median(bucket.arrivals)
            for knot in bucket.knots.values():
                knot.log += level
            bucket.arrivals = None
            self._curves.clear()

    def _nearest(self, index: int) -> _Bucket:
        """The bucket itself, or the nearest that was measured, the shorter of two."""
        own = self._buckets.get(index)
        if own is not None:
            return own
        known = [other for other, bucket in self._buckets.items() if bucket.arrivals is None]
        return self._buckets[min(known, key=lambda other: (abs(other - index), other))]

    def _make_curve(self, index: int, most_rows: int) -> npt.NDArray[np.float64]:
        bucket = self._nearest(index)
        level = self._speed + (_median(bucket.arrivals) if bucket.arrivals else 0.0)
        return _frozen(_interpolated(bucket.knots, np.arange(1, most_rows + 1)) * math.exp(level))

    def to_json(self) -> dict[str, Any]:
        """A plain object that `from_json` reads."""
        times = self.measured
        return {"seconds": {str(end): {str(rows): t for rows, t in row.items()} for end, row in times.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PassCost:
        """What `to_json` wrote.

        Raises:
            ValueError: it is something else.
        """
        table = data.get("seconds")
        if not isinstance(table, dict):
            raise ValueError("lacks the measured seconds")
        measured: dict[int, dict[int, float]] = {}
        for end, row in table.items():
            if not isinstance(row, dict) or not all(is_finite(seconds) for seconds in row.values()):
                raise ValueError(f"holds no seconds for context {end}")
            if not is_whole(int(end), 0):
                raise ValueError(f"holds a context of {end}")
            measured[int(end)] = {int(rows): float(seconds) for rows, seconds in row.items()}
        return cls(measured)


def _bucket_of(context: int) -> int:
    return bisect_left(BUCKET_ENDS, context)


def _end_of(index: int) -> int:
    """A context of that bucket: the longest, or for the last, which has no end, one more than the others'."""
    return BUCKET_ENDS[index] if index < len(BUCKET_ENDS) else BUCKET_ENDS[-1] + 1


def _frozen(curve: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    curve.flags.writeable = False
    return curve


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _interpolated(knots: Mapping[int, _Knot], rows: Any) -> Any:
    """Seconds at `rows` (a number or an array): linear between the knots, which are first made not to fall.

    Beyond the last knot it goes on with the slope of the upper half, which is less noisy than that of the last piece.
    Where one row alone is known, m rows are taken to cost m passes: no draft pays until more is known.
    """
    widths = sorted(knots)
    times = _not_falling([math.exp(knots[width].log) for width in widths], [knots[width].passes for width in widths])
    if len(widths) == 1:
        return times[0] * rows
    half = min(bisect_left(widths, (widths[-1] + 1) // 2), len(widths) - 2)
    slope = (times[-1] - times[half]) / (widths[-1] - widths[half])
    return np.interp(rows, widths, times) + slope * np.maximum(rows - np.asarray(widths[-1]), 0)


def _not_falling(values: list[float], weights: list[int]) -> list[float]:
    """The nearest sequence, in weighted squares, that never falls (pool adjacent violators)."""
    pools: list[tuple[float, int, int]] = []
    for value, weight in zip(values, weights, strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            below = pools.pop()
            total = below[1] + pool[1]
            pool = ((below[0] * below[1] + pool[0] * pool[1]) / total, total, below[2] + pool[2])
        pools.append(pool)
    return [value for value, _, count in pools for _ in range(count)]
