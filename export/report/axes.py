"""Axes and marks of plots as SVG elements with CSS classes.

Coordinates are SVG pixels, x to the right and y downwards. See docs/decisions/0020-plots-drawn-here.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

_TICK_STEPS: Final = (1.0, 2.0, 2.5, 5.0, 10.0)
_LOG_TICKS: Final = (1.0, 2.0, 5.0)
_MARGIN: Final = 0.06
"""Margin at both ends of an axis, as a share of its length."""
_LEFT: Final = 58
_RIGHT: Final = 14
_TOP: Final = 52
_BOTTOM: Final = 42


@dataclass(frozen=True)
class Axis:
    """A scale from values to pixels, from `low` at `start` to `high` at `end`; `start` may be larger than `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Pixel of a value."""
        low, high = self._scaled(self.low), self._scaled(self.high)
        share = (self._scaled(value) - low) / (high - low)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 6) -> list[float]:
        """About `count` round values within the scale."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            parts = (1.0,) if len(decades) > count else _LOG_TICKS
            every = math.ceil(len(decades) / (2 * count))
            found = self._within([part * 10.0**decade for decade in decades[::every] for part in parts])
            if len(found) > 1:
                return found
        raw = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(part * power for part in _TICK_STEPS if part * power >= raw * (1 - 1e-9))
        return self._within([step * at for at in range(math.floor(self.low / step), math.ceil(self.high / step) + 1)])

    def _within(self, values: Sequence[float]) -> list[float]:
        return [value for value in values if self.low <= value <= self.high]

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.log else value


def axis_for(values: Sequence[float], start: float, end: float, *, log: bool = False, zero: bool = False) -> Axis:
    """An axis for all values, which a logarithmic one requires to be positive; `zero` makes it begin at 0."""
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
    """The area of a plot, with its title and the labels of its axes."""

    title: str
    x_label: str
    y_label: str
    width: int = 540
    height: int = 350

    def x_axis(self, values: Sequence[float], *, log: bool = False, zero: bool = False) -> Axis:
        """The horizontal axis; arguments as for `axis_for`."""
        return axis_for(values, _LEFT, self.width - _RIGHT, log=log, zero=zero)

    def y_axis(self, values: Sequence[float], *, log: bool = False, zero: bool = False) -> Axis:
        """The vertical axis; arguments as for `axis_for`."""
        return axis_for(values, self.height - _BOTTOM, _TOP, log=log, zero=zero)

    def svg(self, x: Axis, y: Axis, marks: Sequence[str]) -> str:
        """The whole plot: grid, ticks and labels, then the marks."""
        lower, upper, left, right = self.height - _BOTTOM, _TOP, _LEFT, self.width - _RIGHT
        parts = [text(left, 18, self.title, "title")]
        for value in y.ticks():
            parts.append(line(left, y.at(value), right, y.at(value), "grid"))
            parts.append(text(left - 8, y.at(value) + 4, short_number(value), "tick end"))
        for value in x.ticks(8):
            parts.append(line(x.at(value), lower, x.at(value), lower + 4, "axis"))
            parts.append(text(x.at(value), lower + 17, short_number(value), "tick middle"))
        parts.append(line(left, lower, right, lower, "axis"))
        parts.append(text((left + right) / 2, self.height - 6, self.x_label, "label middle"))
        rotation = f"translate(13 {(lower + upper) / 2:.1f}) rotate(-90)"
        parts.append(f'<text class="label middle" transform="{rotation}">{escape(self.y_label)}</text>')
        return svg(self.width, self.height, self.title, [*parts, *marks])


def svg(width: float, height: float, title: str, parts: Sequence[str], *, scales: bool = True) -> str:
    """An SVG element that scales with the page; with `scales` False it keeps about its width in pixels."""
    style = "" if scales else f' style="max-width: {width:g}px; min-width: min(720px, {width:g}px)"'
    content = "".join(parts)
    return f'<svg viewBox="0 0 {width:g} {height:g}"{style} role="img" aria-label="{escape(title)}">{content}</svg>'


def text(x: float, y: float, content: str, css_class: str) -> str:
    """Text that begins at a point, or ends or is centred there if its class says so."""
    return f'<text class="{css_class}" x="{x:.1f}" y="{y:.1f}">{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, css_class: str) -> str:
    """A straight line."""
    return f'<line class="{css_class}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def path(points: Sequence[tuple[float, float]], css_class: str) -> str:
    """A line through points."""
    coordinates = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="line {css_class}" points="{coordinates}"/>'


def dot(x: float, y: float, radius: float, css_class: str, tooltip: str) -> str:
    """A filled circle with a tooltip."""
    title = f"<title>{escape(tooltip)}</title>"
    return f'<circle class="dot {css_class}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}">{title}</circle>'


def short_number(value: float) -> str:
    """A number in few characters."""
    return f"{value:.10g}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.0e}".replace("e-0", "e-")
