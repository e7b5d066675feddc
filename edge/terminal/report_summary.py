"""Prints the result of an export: size, agreement with the reference, plans, main figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from .output import SafeConsole, figures_text
from .plan_table import plan_table

if TYPE_CHECKING:
    from ...export import ExportResult
    from ...export.report import ModelReport


def show_export(console: SafeConsole, result: ExportResult) -> None:
    """Print the figures of an export, and the notes it left."""
    size = sum(result.file_bytes.values()) / 1e6
    _line(
        console, f"{result.bundle}: {size:.1f} MB, {result.bits_per_weight:.2f} bits per weight, {result.seconds:.1f} s"
    )
    _line(console, f"compared with the reference: {figures_text(result.parity.as_mapping())}")
    if result.report is not None:
        show_report(console, result.report)
    for note in result.notes:
        _line(console, note)


def show_report(console: SafeConsole, report: ModelReport) -> None:
    """Print the plan by layer, the plans that it was compared with, and the main figures of the report."""
    from ...export.report import headlines  # noqa: PLC0415 -- an extra

    layers = plan_table({linear.name: linear.weight_format for linear in report.linears})
    if layers.row_count:
        console.print(layers)
    if len(report.compared) > 1:
        console.print(_plans(report))
    for headline in headlines(report):
        _line(console, f"{headline.name}: {headline.value}" + (f" ({headline.detail})" if headline.detail else ""))
    for note in report.notes:
        _line(console, note)


def _line(console: SafeConsole, text: str) -> None:
    console.print(text, soft_wrap=True)


def _plans(report: ModelReport) -> Table:
    """Bits, bytes, divergence and, where passes were timed, rate of each plan."""
    from ...export.report import megabytes  # noqa: PLC0415 -- an extra

    table = Table(title="plans", title_justify="left", title_style="bold")
    timed = any(1 in plan.milliseconds for plan in report.compared)
    table.add_column("")
    for name in ("bits per weight", "MB per token", "KL", *("tokens/s",) * timed):
        table.add_column(name, justify="right")
    for plan in report.compared:
        cells = [plan.name, f"{plan.bits_per_weight:.2f}", megabytes(plan.bytes_read)]
        cells.append("-" if plan.kl is None else f"{plan.kl:#.3g}")
        if timed:
            cells.append(f"{1e3 / plan.milliseconds[1]:.1f}" if 1 in plan.milliseconds else "-")
        table.add_row(*cells, style="bold" if plan is report.chosen else None)
    return table
