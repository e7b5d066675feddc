"""Axes of a plot, drawn as SVG elements that a page's style sheet colours.

The report needs a handful of plots wherever a model is exported, so that they are drawn here and not by a plotting
library. Coordinates are those of the SVG, in pixels at a scale of 1: x to the right and y downwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

_STEPS: Final = (1.0, 2.0, 2.5, 5.0, 10.0)
_LOG_TICKS: Final = (1.0, 2.0, 5.0)
_MARGIN: Final = 0.06
"""Empty part of an axis at either end."""
_LEFT: Final = 58
_RIGHT: Final = 14
_TOP: Final = 52
_BOTTOM: Final = 42


@dataclass(frozen=True)
class Axis:
    """A scale from values to pixels; `start` is where `low` lies and may be larger than `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value."""
        share = (self._measure(value) - self._measure(self.low)) / (self._measure(self.high) - self._measure(self.low))
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values within the scale, about `most` of them."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            parts = (1.0,) if len(decades) > most else _LOG_TICKS
            every = math.ceil(len(decades) / (2 * most))
            found = self._within([part * 10.0**decade for decade in decades[::every] for part in parts])
            if len(found) > 1:
                return found
        raw = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(part * power for part in _STEPS if part * power >= raw * (1 - 1e-9))
        return self._within([step * at for at in range(math.floor(self.low / step), math.ceil(self.high / step) + 1)])

    def _within(self, values: Sequence[float]) -> list[float]:
        return [value for value in values if self.low <= value <= self.high]

    def _measure(self, value: float) -> float:
        return math.log10(value) if self.log else value


def spanning(values: Sequence[float], start: float, end: float, *, log: bool = False, zero: bool = False) -> Axis:
    """An axis that has room for all values, and for 0 where asked; on a logarithmic one they are above 0."""
    low, high = min(values), max(values)
    if log:
        low, high = math.log10(low), math.log10(high)
    spread = high - low or abs(high) * 0.5 or 1.0
    low, high = low - _MARGIN * spread, high + _MARGIN * spread
    if log:
        return Axis(10.0**low, 10.0**high, start, end, log=True)
    return Axis(0.0 if zero else low, high, start, end)


@dataclass(frozen=True)
class Frame:
    """The area of a plot, its title and what the axes measure."""

    title: str
    x_label: str
    y_label: str
    width: int = 540
    height: int = 350

    def x_axis(self, values: Sequence[float], *, log: bool = False, zero: bool = False) -> Axis:
        """The lower axis."""
        return spanning(values, _LEFT, self.width - _RIGHT, log=log, zero=zero)

    def y_axis(self, values: Sequence[float], *, log: bool = False, zero: bool = False) -> Axis:
        """The left axis."""
        return spanning(values, self.height - _BOTTOM, _TOP, log=log, zero=zero)

    def drawn(self, x: Axis, y: Axis, marks: Sequence[str]) -> str:
        """The whole plot: grid, ticks and labels, then the marks."""
        lower, upper, left, right = self.height - _BOTTOM, _TOP, _LEFT, self.width - _RIGHT
        parts = [text(left, 18, self.title, "title")]
        for value in y.ticks():
            parts.append(line(left, y.at(value), right, y.at(value), "grid"))
            parts.append(text(left - 8, y.at(value) + 4, short(value), "tick end"))
        for value in x.ticks(8):
            parts.append(line(x.at(value), lower, x.at(value), lower + 4, "axis"))
            parts.append(text(x.at(value), lower + 17, short(value), "tick middle"))
        parts.append(line(left, lower, right, lower, "axis"))
        parts.append(text((left + right) / 2, self.height - 6, self.x_label, "label middle"))
        middle = (lower + upper) / 2
        turned = f"translate(13 {middle:.1f}) rotate(-90)"
        parts.append(f'<text class="label middle" transform="{turned}">{escape(self.y_label)}</text>')
        return svg(self.width, self.height, self.title, [*parts, *marks])


def svg(width: float, height: float, title: str, parts: Sequence[str], *, shrinks: bool = True) -> str:
    """An SVG element that scales with its place on the page; or, if it is not to shrink, has about that many pixels."""
    size = "" if shrinks else f' style="max-width: {width:g}px; min-width: min(720px, {width:g}px)"'
    inside = "".join(parts)
    return f'<svg viewBox="0 0 {width:g} {height:g}"{size} role="img" aria-label="{escape(title)}">{inside}</svg>'


def text(x: float, y: float, words: str, kind: str) -> str:
    """Words that begin at a point, unless their kind says that they end or have their middle there."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def path(points: Sequence[tuple[float, float]], kind: str) -> str:
    """A line through points."""
    return f'<polyline class="line {kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def dot(x: float, y: float, radius: float, kind: str, hint: str) -> str:
    """A filled circle; `hint` shows when it is pointed at."""
    return f'<circle class="dot {kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"><title>{escape(hint)}</title></circle>'


def short(value: float) -> str:
    """A number in few characters."""
    return f"{value:.10g}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.0e}".replace("e-0", "e-")
