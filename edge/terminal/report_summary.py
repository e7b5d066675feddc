"""What an export chose, on the terminal: the plan by layer, the plan beside others, and the figures in a few lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from .plan_table import plan_table

if TYPE_CHECKING:
    from ...export.report import ModelReport


def show_report(console: Console, report: ModelReport) -> None:
    """Print what a reader wants to know at once; the rest is in the report's page."""
    from ...export.report import heads_of  # noqa: PLC0415 -- an extra

    layers = plan_table({linear.name: linear.form for linear in report.linears})
    if layers.row_count:
        console.print(layers)
    if len(report.compared) > 1:
        console.print(_plans(report))
    for head in heads_of(report):
        console.print(f"{head.name}: {head.value}" + (f" ({head.beside})" if head.beside else ""), soft_wrap=True)
    for note in report.notes:
        console.print(note, soft_wrap=True)


def _plans(report: ModelReport) -> Table:
    """Plans by bytes, with the KL and, where passes were timed, the rate of each."""
    from ...export.report import megabytes  # noqa: PLC0415 -- an extra

    table = Table(title="plans", title_justify="left", title_style="bold")
    timed = any(1 in plan.milliseconds for plan in report.compared)
    table.add_column("")
    for name in ("bits a weight", "MB a token", "KL", *("tokens/s",) * timed):
        table.add_column(name, justify="right")
    for plan in report.compared:
        cells = [plan.name, f"{plan.bits_per_weight:.2f}", megabytes(plan.bytes_read)]
        cells.append("-" if plan.kl is None else f"{plan.kl:#.3g}")
        if timed:
            cells.append(f"{1e3 / plan.milliseconds[1]:.1f}" if 1 in plan.milliseconds else "-")
        table.add_row(*cells, style="bold" if plan is report.chosen else None)
    return table
