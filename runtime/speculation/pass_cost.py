"""Pass cost t(m): seconds of a target pass over m tokens on this machine, by context length.

Wide passes pay only where they cost less than several narrow ones, and how much less depends on kernel, weights and
memory bus, with steps that no formula has. So t(m) is measured (`measure.pass_timing`) and refined by every pass. A
machine also changes speed as a whole, when it gets hot or busy; that is separated from the shape of the curve,
otherwise a slow minute at one width would make the other widths look cheap.

A graph of fixed shapes takes as long for fewer tokens as for its whole width: its curve is a staircase over the widths
for which there are graphs.

Costs that were measured while other programs used the processor, or that passes contradict, are doubtful: they follow
the passes that run quickly, until they are measured again.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...models.json_file import Count, WholeNumber, record_from_json
from .cost_knots import MAX_WEIGHT, Knot, clipped, count_strays, interpolated, staircase

MAX_OBSERVED_WIDTH: Final = 256
"""Maximum width of a pass that is observed; prefill passes are wider and not relevant for drafts."""
BUCKET_ENDS: Final = (512, 2048, 8192, 32768, 131072)
"""Upper ends of the context buckets; attention reads the whole context, so each bucket, and the contexts beyond the
last one, has its own t(m)."""

_FLAT_WIDTH: Final = 16
"""Number of tokens of the pass whose time is compared with that of a single token."""
_FLAT: Final = 1.1
"""The largest ratio of the two times that counts as the same."""
_WINDOW: Final = 15
_MIDDLE: Final = _WINDOW // 2
_INHERITED_WEIGHT: Final = 4
"""Number of passes that an estimate interpolated from its neighbours counts for."""
_QUARTER: Final = _WINDOW // 4
"""Place of the lower quartile of the passes, which is taken while costs are doubtful: on a busy machine half of the
passes may be disturbed, and a disturbance makes a pass slower, never faster."""
_STRAY_PASSES: Final = 12
"""Passes in a row of one width that must contradict its cost relative to the other widths."""
_STRAY_SPEEDS: Final = 64
"""Passes in a row that must contradict the measured speed."""
TOLERANCE: Final = 0.02
"""Change of speed, in log seconds, below which the curves are not updated: too small to change a decision."""
_NO_CURVE: Final = 0.0, np.empty(0)
_SHAPE_TOLERANCE: Final = 0.06
"""Sum of the changes of the estimates after which a curve is made again, which takes 50 us."""
POSITION_COST: Final = 0.3
"""Upper estimate of what each further position of a pass costs, in passes of width 1, where nothing better is known."""


class Doubt(StrEnum):
    """Why the costs may be wrong."""

    BUSY = "busy"
    """Other programs used the processor while they were measured, or what was measured cannot be otherwise."""
    OUTDATED = "outdated"
    """Passes on an idle machine took something else."""


@dataclass
class _Bucket:
    """The estimates of one context bucket."""

    knots: dict[int, Knot]
    first_residuals: list[float] | None = None
    """Residuals of the first passes in a bucket that was not measured; None in all others."""
    moved: float = 0.0
    """Sum of the changes since the curve was made."""


class _Pass(NamedTuple):
    bucket: _Bucket
    knot: Knot
    log: float
    """Log seconds of the pass."""


class PassCost:
    """Seconds of a pass by width (number of tokens) and context length: positive, never falling with the width.

    `log t = speed + shape[bucket][m]`. The speed is the median residual of the last 15 passes of any width. The shape
    learns from the pass in the middle of those 15, relative to their median: with as many passes before as after, a
    change of speed changes the speed only. Each pass contributes a clipped difference, so one disturbed pass does
    little harm, less the mean of all contributions, so that speed and shape do not drift apart.

    Args:
        measured: seconds by context length and width; one context per bucket, width 1 among the widths.
        doubt: why the measurements may be wrong; None if nothing is known against them.
        measurements: how often the costs have been measured, this time included.
        stairs: whether passes have the measured widths only, and fewer tokens are padded. Otherwise the costs of other
            widths lie between.

    Raises:
        ValueError: there are no measurements, two contexts in a bucket, no width 1, a value that is not a time, or
            stairs of different widths.
    """

    def __init__(
        self,
        measured: Mapping[int, Mapping[int, float]],
        doubt: Doubt | None = None,
        measurements: int = 1,
        *,
        stairs: bool = False,
    ) -> None:
        self.measurements: Final = measurements
        self.stairs: Final = tuple(sorted(next(iter(measured.values())))) if stairs and measured else None
        """Widths of the passes if there are no others, ascending."""
        self.doubt = doubt
        """Why the costs may be wrong; None if nothing is known against them."""
        self._speed_strays = 0
        self._buckets: dict[int, _Bucket] = {}
        for context, times in measured.items():
            index = _bucket_of(context)
            if index in self._buckets or 1 not in times:
                raise ValueError(f"context {context}: its bucket was measured twice, or not at width 1")
            if self.stairs is not None and tuple(sorted(times)) != self.stairs:
                raise ValueError(f"context {context}: passes have the widths {self.stairs}, not {sorted(times)}")
            for width, seconds in times.items():
                if not 1 <= width <= MAX_OBSERVED_WIDTH or not 0 < seconds < math.inf:
                    raise ValueError(f"{seconds} s for a pass of width {width}")
            accepted = times if doubt is None else made_plausible(times)
            knots = {width: Knot(math.log(accepted[width]), MAX_WEIGHT) for width in sorted(accepted)}
            self._buckets[index] = _Bucket(knots)
            if doubt is not None:
                for knot in knots.values():
                    knot.distrust()
        if not self._buckets:
            raise ValueError("there are no measurements")
        self._speed = 0.0
        self._common = 0.0
        """Running mean of what passes contribute to the shape."""
        self._recent: deque[_Pass] = deque(maxlen=_WINDOW)
        self._curves: dict[int, tuple[float, npt.NDArray[np.float64]]] = {}
        """By context bucket: a curve, and the speed that it was made for."""
        self.observed = 0
        """Number of passes observed since this object was made."""

    @property
    def is_contradicted(self) -> bool:
        """Whether many passes in a row took something else than was measured."""
        return abs(self._speed_strays) >= _STRAY_SPEEDS or any(
            abs(knot.strays) >= _STRAY_PASSES for knot in self._knots()
        )

    def distrust(self) -> None:
        """Doubt the costs from now on, because passes contradict them: learn quickly."""
        self.doubt = self.doubt or Doubt.OUTDATED
        self._speed_strays = 0
        for knot in self._knots():
            knot.distrust()

    def forget_strays(self) -> None:
        """Hold nothing against the costs that passes took so far: other programs disturbed them."""
        self._speed_strays = 0
        for knot in self._knots():
            knot.strays = 0

    def _knots(self) -> Iterator[Knot]:
        return chain.from_iterable(bucket.knots.values() for bucket in self._buckets.values())

    @property
    def measured(self) -> dict[int, dict[int, float]]:
        """Seconds by end of the context bucket and width, for the widths that were run, at the current speed.

        The last bucket, which has no end, has its shortest context.
        """
        return {
            (*BUCKET_ENDS, BUCKET_ENDS[-1] + 1)[index]: {
                width: math.exp(knot.log + self._speed) for width, knot in sorted(bucket.knots.items())
            }
            for index, bucket in sorted(self._buckets.items())
            if bucket.first_residuals is None
        }

    @property
    def max_width(self) -> int:
        """Largest number of tokens of one pass whose cost is known, or can be estimated."""
        return MAX_OBSERVED_WIDTH if self.stairs is None else self.stairs[-1]

    def seconds(self, width: int, context: int) -> float:
        """Seconds of a pass over `width` tokens after `context` cached ones."""
        return float(self.curve(context, width)[width - 1])

    def is_flat(self, context: int) -> bool:
        """Whether a pass over several tokens takes about as long as one over one token, as in fixed-width graphs."""
        return self.seconds(_FLAT_WIDTH, context) < _FLAT * self.seconds(1, context)

    def curve(self, context: int, max_width: int) -> npt.NDArray[np.float64]:
        """Seconds of passes over 1 to `max_width` tokens, float64 `[max_width]`, read-only."""
        index = _bucket_of(context)
        speed, curve = self._curves.get(index, _NO_CURVE)
        if curve.size < max_width:
            bucket = self._nearest(index)
            level = self._speed + (_median(bucket.first_residuals) if bucket.first_residuals else 0.0)
            make = interpolated if self.stairs is None else staircase
            curve = make(bucket.knots, np.arange(1, max(max_width, 32) + 1)) * math.exp(level)
        elif speed != self._speed:
            curve = curve * math.exp(self._speed - speed)
        curve.flags.writeable = False
        self._curves[index] = self._speed, curve
        return curve[:max_width]

    def observe(self, width: int, context: int, seconds: float) -> None:
        """Learn that a pass over `width` tokens after `context` cached ones took `seconds`."""
        if not 1 <= width <= self.max_width or not 0 < seconds < math.inf:
            return
        if self.stairs is not None:
            width = self.stairs[bisect_left(self.stairs, width)]
        self.observed += 1
        index = _bucket_of(context)
        bucket = self._buckets.get(index)
        if bucket is None:
            # A bucket of the same shape as the nearest one, whose level is not known yet.
            knots = {each: Knot(knot.log, _INHERITED_WEIGHT) for each, knot in self._nearest(index).knots.items()}
            bucket = self._buckets[index] = _Bucket(knots, [])
        if (knot := bucket.knots.get(width)) is None:
            knot = bucket.knots[width] = Knot(math.log(interpolated(bucket.knots, width)), _INHERITED_WEIGHT)
        seen = _Pass(bucket, knot, math.log(seconds))
        if bucket.first_residuals is not None:
            self._learn_level(index, bucket, seen.log - knot.log - self._speed)
            return
        self._recent.append(seen)
        place = _MIDDLE if self.doubt is None else _QUARTER
        # Without calling a property of each: between two passes, every further piece of code takes its time.
        residuals = [entry.log - entry.knot.log for entry in self._recent]
        speed = sorted(residuals + [0.0] * (_WINDOW - len(residuals)))[place]
        if abs(speed - self._speed) > TOLERANCE:
            self._speed = speed
        self._speed_strays = count_strays(self._speed_strays, speed)
        if len(self._recent) > _MIDDLE:
            self._learn_shape(self._recent[-1 - _MIDDLE], speed)

    def _learn_shape(self, seen: _Pass, speed: float) -> None:
        """Attribute to a pass's width what the speed of the passes around it does not explain."""
        if seen.knot.first is not None and all(entry.knot is seen.knot for entry in self._recent):
            # Passes of one width alone tell the speed. Their noise must not move this width against the others.
            return
        # Disturbances make passes slower only, so their mean lies above the speed, and all estimates would rise while
        # the speed falls, until the estimates of widths and contexts that are not run are far too low.
        common = self._common
        if seen.knot.first is None:
            self._common += (clipped(seen.log - seen.knot.log - speed) - common) / MAX_WEIGHT
        seen.bucket.moved += abs(seen.knot.learn(seen.log - speed, common))
        if seen.bucket.moved > _SHAPE_TOLERANCE:
            seen.bucket.moved = 0.0
            self._curves.clear()

    def _learn_level(self, index: int, bucket: _Bucket, residual: float) -> None:
        """Estimate from the first passes in an unmeasured bucket how much slower it is than its neighbour."""
        assert bucket.first_residuals is not None  # noqa: S101  checked by the caller
        bucket.first_residuals.append(residual)
        self._curves.pop(index, None)
        if len(bucket.first_residuals) > _MIDDLE:
            level = _median(bucket.first_residuals)
            for knot in bucket.knots.values():
                knot.log += level
            bucket.first_residuals = None
            self._curves.clear()

    def _nearest(self, index: int) -> _Bucket:
        """The bucket itself, or the nearest one that was measured, the shorter of two."""
        own = self._buckets.get(index)
        if own is not None:
            return own
        known = [other for other, bucket in self._buckets.items() if bucket.first_residuals is None]
        return self._buckets[min(known, key=lambda other: (abs(other - index), other))]

    def to_json(self) -> dict[str, Any]:
        """The measurements as a JSON object that `from_json` reads."""
        return asdict(_StoredCosts(self.measured, self.doubt, self.measurements, self.stairs is not None))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PassCost:
        """Read what `to_json` wrote.

        Raises:
            ValueError: the data is something else.
        """
        stored = record_from_json(_StoredCosts, data)
        return cls(stored.seconds, stored.doubt, stored.measurements, stairs=stored.stairs)


@dataclass(frozen=True)
class _StoredCosts:
    """The form in which pass costs are stored."""

    seconds: Mapping[WholeNumber, Mapping[int, float]]
    doubt: Doubt | None = None
    measurements: Count = 1
    stairs: bool = False


def _bucket_of(context: int) -> int:
    return bisect_left(BUCKET_ENDS, context)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def is_plausible(times: Mapping[int, float]) -> bool:
    """Whether an undisturbed machine can have these costs by width.

    A pass over m tokens can do no more work than m passes over one, and no less than a narrower pass. Kernels and
    disturbances may double that.
    """
    least = times[1] / 2
    for width in sorted(times):
        if not least <= times[width] <= 2 * width * times[1]:
            return False
        least = max(least, times[width] / 2)
    return True


def made_plausible(times: Mapping[int, float]) -> dict[int, float]:
    """Doubtful costs without what cannot be: a disturbed pass took too long, never too short.

    Too high a cost would keep passes of that width from ever being run, and the cost from being corrected.
    """
    found: dict[int, float] = {}
    least = math.inf
    for width in sorted(times, reverse=True):
        least = found[width] = min(least, times[width])
    single = found[1]
    return {
        width: seconds if seconds <= 2 * width * single else single * (1 + POSITION_COST * (width - 1))
        for width, seconds in found.items()
    }
