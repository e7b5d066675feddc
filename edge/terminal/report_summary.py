"""Prints the result of an export: size, agreement with the reference, plans, weights by layer, main figures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from rich.table import Table

from ...models.manifest import WeightFormat
from .output import SafeConsole

if TYPE_CHECKING:
    from ...export import ExportResult
    from ...export.report.figures import ModelReport

_NOISE_KL: Final = 1e-8
"""KL in nats below which a difference is the noise of float32 arithmetic."""
_LAYER_LINEAR: Final = re.compile(r"layers\.(\d+)\.(.+)")
_PARTS: Final = ("qkv", "o", "router", "gate_up", "down")
"""The linears of a layer in the order of the graph; others come after them."""


def show_export(console: SafeConsole, result: ExportResult) -> None:
    """Print the figures of an export, and the notes it left."""
    from ...export.report.tables import bits_text, quality_text  # noqa: PLC0415 -- an extra

    size = sum(result.file_bytes.values()) / 1e6
    bits = bits_text(result.bits_per_weight_read, result.bits_per_weight)
    _line(console, f"{result.bundle}: {size:.1f} MB, {result.seconds:.1f} s, {bits}")
    if result.quality is not None:
        _line(
            console,
            f"quality on a sample text of {result.quality.tokens} tokens: {quality_text(result.quality)}; "
            "to measure it on more text: --report",
        )
    elif result.report is not None:
        show_report(console, result.report)
    elif result.parity.mean_kl > _NOISE_KL:  # an upgraded ONNX model, whose weights may have been quantized before
        _line(
            console,
            f"compared with the source on random tokens: mean KL {result.parity.mean_kl:#.3g}, "
            f"top-1 agreement {result.parity.top1_agreement:.1%}",
        )
    for note in result.notes:
        _line(console, note)


def show_report(console: SafeConsole, report: ModelReport) -> None:
    """Print the plan by layer, the plans that it was compared with, and the main figures of the report."""
    from ...export.report.tables import gain_text, headlines, quality_text  # noqa: PLC0415 -- an extra

    layers = plan_table({linear.name: linear.weight_format for linear in report.linears})
    if layers.row_count:
        console.print(layers)
    if len(report.compared) > 1:
        console.print(_plans(report))
    text = report.calibration
    measured_on = f"{text.held_out_tokens} held-out tokens of {text.origin}"
    _line(console, f"quality on {measured_on}: {quality_text(report.shipped)}")
    if gain := gain_text(report):
        _line(console, gain)
    for headline in headlines(report):
        if not headline.of_quality:
            _line(console, f"{headline.name}: {headline.value}" + (f" ({headline.detail})" if headline.detail else ""))
    for note in report.notes:
        _line(console, note)


def _line(console: SafeConsole, text: str) -> None:
    console.print(text, soft_wrap=True)


def _plans(report: ModelReport) -> Table:
    """Bits, bytes and, where they were measured, divergence and rate of each plan."""
    from ...export.report.tables import megabytes  # noqa: PLC0415 -- an extra

    table = Table(title="plans", title_justify="left", title_style="bold")
    timed = any(1 in plan.milliseconds for plan in report.compared)
    table.add_column("")
    names = ("bits per weight read", "MB per token", "KL of the weights alone", *("tokens/s",) * timed)
    for name in names:
        table.add_column(name, justify="right")
    for plan in report.compared:
        cells = [plan.name, f"{plan.bits_per_weight:.2f}", megabytes(plan.bytes_read), f"{plan.kl:#.3g}"]
        if timed:
            cells.append(f"{1e3 / plan.milliseconds[1]:.1f}" if 1 in plan.milliseconds else "-")
        table.add_row(*cells, style="bold" if plan is report.chosen else None)
    return table


def layer_runs(weights: Mapping[str, WeightFormat]) -> list[tuple[int, int, dict[str, str]]]:
    """The layers of a plan in order, of which equal neighbours are one run.

    Returns:
        For each run its first and last layer, and the format of each linear in words, by its name within a layer.
        Formats name their method where there are several methods.
    """
    in_layers = {found: each for name, each in weights.items() if (found := _LAYER_LINEAR.fullmatch(name))}
    several = len({each.method for each in in_layers.values() if each.bits != 32}) > 1
    layers: dict[int, dict[str, str]] = {}
    for found, each in in_layers.items():
        text = f"{each} {each.method.value}" if each.method is not None and several else str(each)
        layers.setdefault(int(found[1]), {})[found[2]] = text
    runs: list[tuple[int, int, dict[str, str]]] = []
    for layer, linears in sorted(layers.items()):
        if runs and runs[-1][1:] == (layer - 1, linears):
            runs[-1] = (runs[-1][0], layer, linears)
        else:
            runs.append((layer, layer, linears))
    return runs


def plan_table(weights: Mapping[str, WeightFormat]) -> Table:
    """The layers of a plan for a terminal."""
    runs = layer_runs(weights)
    parts = sorted({part for _, _, linears in runs for part in linears}, key=_order)
    table = Table(title="weights by layer", title_justify="left", title_style="bold", min_width=len("weights by layer"))
    for name in ("", *parts):
        table.add_column(name, overflow="fold")
    for first, last, linears in runs:
        label = f"layer {first}" if first == last else f"layers {first} to {last}"
        table.add_row(label, *(linears.get(part, "-") for part in parts))
    return table


def _order(part: str) -> tuple[int, str]:
    return (_PARTS.index(part) if part in _PARTS else len(_PARTS), part)
