"""What each matrix got and what it costs, in cells: layers side by side, the units of a layer below each other."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import Final

from .axes import Axis, svg, text
from .figures import LinearFigures

_LAYER_LINEAR: Final = re.compile(r"layers\.(\d+)\.(.+)")
_WIDE: Final = 1108
_LABELS: Final = 74
_GAP: Final = 10
_CELL_HEIGHT: Final = 30
_LETTER: Final = 8
"""Pixels of a letter of a title, at most."""
_WIDEST_CELL: Final = 62
_TWO_LINES: Final = 25
"""Pixels of a cell that has room for more than a digit."""
_STRONG: Final = 0.6
"""Shade from which on words are dark, whatever the page."""


def bits_grid(linears: Sequence[LinearFigures]) -> str | None:
    """Bits and block of each unit."""
    return _grid("Bits of each matrix, and weights that share a scale", linears, _bits, _bits_kind)


def _bits(linear: LinearFigures) -> tuple[str, str]:
    """Bits, and the weights of a block."""
    return str(linear.weight_format.bits), f"/{linear.weight_format.block}" if linear.weight_format.block else ""


def _bits_kind(linear: LinearFigures) -> tuple[str, float]:
    known = next((bits for bits in (2, 4, 8) if linear.weight_format.bits <= bits), 32)
    return f"bits{known}", 1.0


def kl_alone_grid(linears: Sequence[LinearFigures]) -> str | None:
    """The grid of solo KL, the darker the more."""
    logs = [math.log10(linear.kl_alone) for linear in linears if linear.kl_alone is not None and linear.kl_alone > 0]
    if not logs:
        return None
    scale = Axis(min(logs), max(logs) if max(logs) > min(logs) else min(logs) + 1, 0.08, 1.0)

    def words(linear: LinearFigures) -> tuple[str, str]:
        return ("-" if linear.kl_alone is None else f"{linear.kl_alone:.0e}".replace("e-0", "e-")), ""

    def shade(linear: LinearFigures) -> tuple[str, float]:
        if linear.kl_alone is None or linear.kl_alone <= 0:
            return "cost", 0.0
        share = scale.at(math.log10(linear.kl_alone))
        return "cost strong" if share > _STRONG else "cost", share

    return _grid("KL of each matrix when it alone is rounded, nats", linears, words, shade)


def _grid(
    title: str,
    linears: Sequence[LinearFigures],
    words: Callable[[LinearFigures], tuple[str, str]],
    shade: Callable[[LinearFigures], tuple[str, float]],
) -> str | None:
    """A cell for each unit: layers from left to right, the units of a layer below each other, the others at the end."""
    placed: dict[tuple[str, int], LinearFigures] = {}
    outer = []
    for linear in linears:
        if found := _LAYER_LINEAR.fullmatch(linear.name):
            placed[found[2], int(found[1])] = linear
        else:
            outer.append(linear)
    if not placed:
        return None
    parts = list(dict.fromkeys(part for part, _ in placed))
    layers = 1 + max(layer for _, layer in placed)
    outer_width = 2 * _WIDEST_CELL + _GAP if outer else 0
    cell = min(_WIDEST_CELL, (_WIDE - _LABELS - outer_width - _GAP) / layers)
    top = 46
    drawn = [text(0, 18, title, "title")]
    every = 1 if cell >= _TWO_LINES / 1.5 else 5
    drawn += [text(_LABELS + (at + 0.5) * cell, top - 6, str(at), "tick middle") for at in range(0, layers, every)]
    drawn += [text(_LABELS - 8, top + (at + 0.5) * _CELL_HEIGHT + 4, part, "tick end") for at, part in enumerate(parts)]
    for (part, layer), linear in placed.items():
        drawn.append(_cell(_LABELS + layer * cell, top + parts.index(part) * _CELL_HEIGHT, cell, linear, words, shade))
    left = _LABELS + layers * cell + _GAP
    for row, linear in enumerate(outer):
        drawn.append(_cell(left, top + row * _CELL_HEIGHT, _WIDEST_CELL, linear, words, shade))
        drawn.append(text(left + _WIDEST_CELL + 8, top + (row + 0.5) * _CELL_HEIGHT + 4, linear.name, "tick"))
    rows = max(len(parts), len(outer))
    width = max(left + outer_width, _LETTER * len(title))
    return svg(width, top + rows * _CELL_HEIGHT + 4, title, drawn, shrinks=False)


def _cell(
    x: float,
    y: float,
    width: float,
    linear: LinearFigures,
    words: Callable[[LinearFigures], tuple[str, str]],
    shade: Callable[[LinearFigures], tuple[str, float]],
) -> str:
    first, second = words(linear)
    kind, opacity = shade(linear)
    hint = f"{linear.name}: {linear.weight_format}, {linear.bytes_read / 1e6:.4g} MB"
    if linear.kl_alone is not None:
        hint += f", KL {linear.kl_alone:.3g}"
    middle, base = x + width / 2, y + _CELL_HEIGHT / 2 + 4
    shown = text(middle, base, first + second, f"middle {kind}")
    if width < _TWO_LINES:
        shown = text(middle, base, first, f"middle {kind}") if len(first) == 1 else ""
    elif second and width < _WIDEST_CELL:
        shown = text(middle, base - 4, first, f"middle {kind}") + text(middle, base + 7, second, f"small middle {kind}")
    return (
        f'<g><title>{escape(hint)}</title><rect class="fill {kind}" x="{x + 1:.1f}" y="{y + 1:.1f}" '
        f'width="{width - 2:.1f}" height="{_CELL_HEIGHT - 2}" rx="3" fill-opacity="{opacity:.2f}"/>{shown}</g>'
    )
