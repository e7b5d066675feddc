"""A quantization plan as a table, with one row for equal neighbouring layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rich.table import Table

from ...models.manifest import WeightFormat

_LAYER_LINEAR: Final = re.compile(r"layers\.(\d+)\.(.+)")
_PARTS: Final = ("qkv", "o", "router", "gate_up", "down")
"""The linears of a layer in the order of the graph; others come after them."""


@dataclass(frozen=True)
class LayerRun:
    """Neighbouring layers whose linears have the same formats."""

    first: int
    last: int
    linears: Mapping[str, str]
    """Format of each linear in words, by its name within a layer."""

    @property
    def label(self) -> str:
        """The layers of this run in words."""
        return f"layer {self.first}" if self.first == self.last else f"layers {self.first} to {self.last}"


def layer_runs(weights: Mapping[str, WeightFormat]) -> list[LayerRun]:
    """The layers of a plan in order; equal neighbours are one run."""
    formats = _format_texts(weights)
    layers: dict[int, dict[str, str]] = {}
    for name, text in formats.items():
        if found := _LAYER_LINEAR.fullmatch(name):
            layers.setdefault(int(found[1]), {})[found[2]] = text
    runs: list[LayerRun] = []
    for layer, linears in sorted(layers.items()):
        if runs and runs[-1].last == layer - 1 and runs[-1].linears == linears:
            runs[-1] = LayerRun(runs[-1].first, layer, linears)
        else:
            runs.append(LayerRun(layer, layer, linears))
    return runs


def plan_table(weights: Mapping[str, WeightFormat]) -> Table:
    """The layers of a plan for a terminal; formats name their method where there are several methods."""
    runs = layer_runs(weights)
    parts = sorted({part for run in runs for part in run.linears}, key=_order)
    table = Table(title="weights by layer", title_justify="left", title_style="bold", min_width=len("weights by layer"))
    for name in ("", *parts):
        table.add_column(name, overflow="fold")
    for run in runs:
        table.add_row(run.label, *(run.linears.get(part, "-") for part in parts))
    return table


def _order(part: str) -> tuple[int, str]:
    return (_PARTS.index(part) if part in _PARTS else len(_PARTS), part)


def _format_texts(weights: Mapping[str, WeightFormat]) -> dict[str, str]:
    in_layers = [each for name, each in weights.items() if each.bits != 32 and _LAYER_LINEAR.fullmatch(name)]
    several = len({each.method for each in in_layers}) > 1
    return {
        name: f"{each} {each.method.value}" if each.method is not None and several else str(each)
        for name, each in weights.items()
    }
