"""Grids with a cell for each linear, layers from left to right."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from .axes import Axis, svg, text
from .figures import LinearFigures

_IN_LAYER: Final = re.compile(r"layers\.(\d+)\.(.+)")
_MAX_WIDTH: Final = 1108
_LABEL_WIDTH: Final = 74
_GAP: Final = 10
_TOP: Final = 46
_CELL_HEIGHT: Final = 30
_LETTER_WIDTH: Final = 8
"""Largest width of a letter of a title in pixels."""
_MAX_CELL_WIDTH: Final = 62
_MIN_TEXT_WIDTH: Final = 25
"""Smallest width of a cell, in pixels, that has room for more than a digit."""
_STRONG_SHADE: Final = 0.6
"""Shade from which on text is dark on any page."""


@dataclass(frozen=True)
class _CellStyle:
    """Text and colour of a cell."""

    text: str
    css_class: str
    opacity: float = 1.0
    second_line: str = ""
    """Text that is put below the other one in a narrow cell."""


def bits_grid(linears: Sequence[LinearFigures]) -> str | None:
    """Bits and block size of each linear."""

    def style(linear: LinearFigures) -> _CellStyle:
        weight_format = linear.weight_format
        css_class = f"bits{next((bits for bits in (2, 4, 8) if weight_format.bits <= bits), 32)}"
        block = f"/{weight_format.block}" if weight_format.block else ""
        return _CellStyle(str(weight_format.bits), css_class, second_line=block)

    return _grid("Bits and block size of each linear", linears, style)


def kl_grid(linears: Sequence[LinearFigures]) -> str | None:
    """KL of the model with each linear alone quantized; the darker, the more."""
    logs = [math.log10(linear.kl_alone) for linear in linears if linear.kl_alone is not None and linear.kl_alone > 0]
    if not logs:
        return None
    scale = Axis(min(logs), max(logs) if max(logs) > min(logs) else min(logs) + 1, 0.08, 1.0)

    def style(linear: LinearFigures) -> _CellStyle:
        kl = linear.kl_alone
        number = "-" if kl is None else f"{kl:.0e}".replace("e-0", "e-")
        if kl is None or kl <= 0:
            return _CellStyle(number, "cost", 0.0)
        shade = scale.at(math.log10(kl))
        return _CellStyle(number, "cost strong" if shade > _STRONG_SHADE else "cost", shade)

    return _grid("KL with each linear alone quantized, nats", linears, style)


def _grid(title: str, linears: Sequence[LinearFigures], style: Callable[[LinearFigures], _CellStyle]) -> str | None:
    """A grid of the linears inside layers, with the other linears at its right."""
    in_layers: dict[tuple[str, int], LinearFigures] = {}
    outer = []
    for linear in linears:
        if found := _IN_LAYER.fullmatch(linear.name):
            in_layers[found[2], int(found[1])] = linear
        else:
            outer.append(linear)
    if not in_layers:
        return None
    kinds = list(dict.fromkeys(kind for kind, _ in in_layers))
    layers = 1 + max(layer for _, layer in in_layers)
    outer_width = 2 * _MAX_CELL_WIDTH + _GAP if outer else 0
    width = min(_MAX_CELL_WIDTH, (_MAX_WIDTH - _LABEL_WIDTH - outer_width - _GAP) / layers)
    parts = [text(0, 18, title, "title")]
    numbered = range(0, layers, 1 if width >= _MIN_TEXT_WIDTH / 1.5 else 5)
    parts += [text(_LABEL_WIDTH + (at + 0.5) * width, _TOP - 6, str(at), "tick middle") for at in numbered]
    centres = [_TOP + (row + 0.5) * _CELL_HEIGHT + 4 for row in range(max(len(kinds), len(outer)))]
    parts += [text(_LABEL_WIDTH - 8, y, kind, "tick end") for kind, y in zip(kinds, centres, strict=False)]
    for (kind, layer), linear in in_layers.items():
        y = _TOP + kinds.index(kind) * _CELL_HEIGHT
        parts.append(_cell(_LABEL_WIDTH + layer * width, y, width, linear, style(linear)))
    right = _LABEL_WIDTH + layers * width + _GAP
    for row, linear in enumerate(outer):
        y = _TOP + row * _CELL_HEIGHT
        parts.append(_cell(right, y, _MAX_CELL_WIDTH, linear, style(linear)))
        parts.append(text(right + _MAX_CELL_WIDTH + 8, centres[row], linear.name, "tick"))
    height = _TOP + max(len(kinds), len(outer)) * _CELL_HEIGHT + 4
    return svg(max(right + outer_width, _LETTER_WIDTH * len(title)), height, title, parts, scales=False)


def _cell(x: float, y: float, width: float, linear: LinearFigures, style: _CellStyle) -> str:
    tooltip = f"{linear.name}: {linear.weight_format}, {linear.bytes_read / 1e6:.4g} MB"
    if linear.kl_alone is not None:
        tooltip += f", KL alone {linear.kl_alone:.3g}"
    middle, base, css_class = x + width / 2, y + _CELL_HEIGHT / 2 + 4, style.css_class
    content = text(middle, base, style.text + style.second_line, f"middle {css_class}")
    if width < _MIN_TEXT_WIDTH:
        content = text(middle, base, style.text, f"middle {css_class}") if len(style.text) == 1 else ""
    elif style.second_line and width < _MAX_CELL_WIDTH:
        content = text(middle, base - 4, style.text, f"middle {css_class}")
        content += text(middle, base + 7, style.second_line, f"small middle {css_class}")
    return (
        f'<g><title>{escape(tooltip)}</title><rect class="fill {css_class}" x="{x + 1:.1f}" y="{y + 1:.1f}" '
        f'width="{width - 2:.1f}" height="{_CELL_HEIGHT - 2}" rx="3" fill-opacity="{style.opacity:.2f}"/>{content}</g>'
    )
