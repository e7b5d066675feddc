"""Tables of a measurement for the terminal."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...runtime.result import DraftCounts
from .bench_result import BUSY_NOTE, BenchConditions, BenchResult
from .clients import COLUMNS, ClientsResult
from .ratios import Estimate, ModeResult, round_ms

_MAX_DEPTH: Final = 8


def show(console: Console, result: BenchResult | ClientsResult) -> None:
    """Print the headlines, tables and notes of a measurement."""
    if isinstance(result, ClientsResult):
        _show_clients(console, result)
        return
    console.print(_heading(result.conditions))
    for line in result.headlines:
        console.print(Text(f"  {line}.", "bold"), soft_wrap=True)
    tables = [*map(_categories, result.modes), _drafters(result), _rounds(result)]
    if any(mode.stats.by_depth for mode in result.modes):
        tables.append(_depths(result))
    for table in tables:
        if table.row_count:
            console.print(table)
    for note in result.notes:
        console.print(f"  {note}", soft_wrap=True)


def _show_clients(console: Console, result: ClientsResult) -> None:
    console.print(_heading(result.conditions))
    columns = ("clients", "tokens/s", "ratio", "first token, ms", "p95", "per token, ms", "p95")
    table = _table("tokens per second of all clients together, and the times of a request", *columns)
    for row in result.rows:
        table.add_row(str(row["clients"]), *(f"{row[name]:.{2 if name == 'ratio' else 1}f}" for name in COLUMNS))
    console.print(table)
    tokens = f"{result.prompt_tokens} tokens, answers of {result.conditions.max_tokens}"
    console.print(f"  Prompts of {tokens}; --spec {result.speculation}. Medians; ratios are to one client.")
    if result.busy:
        console.print(f"  {BUSY_NOTE}", soft_wrap=True)


def _heading(conditions: BenchConditions) -> Text:
    draft = f" with draft model {conditions.draft}" if conditions.draft else ""
    text = Text(conditions.model, "bold")
    return text.append(f"{draft} on {conditions.device}: {conditions.source}", "not bold")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", min_width=len(title))
    table.add_column(columns[0])
    for name in columns[1:]:
        table.add_column(name, justify="right")
    return table


def ratio_text(estimate: Estimate) -> str:
    """A ratio with its confidence interval."""
    if estimate.interval is None:
        return f"{estimate.value:.2f}"
    low, high = estimate.interval
    return f"{estimate.value:.2f} [{low:.2f}, {high:.2f}]"


def acceptance_text(counts: DraftCounts) -> str:
    """An acceptance rate in per cent."""
    return f"{counts.acceptance_rate:.0%}" if counts.drafted else "-"


def _categories(mode: ModeResult) -> Table:
    table = _table(
        f"{mode.name} compared with plain decoding, tokens per second",
        *("", "answers", "plain", mode.name, "ratio", "tokens per pass", "accepted"),
    )
    rows = [(each.name, each.plain, each.stats, each.ratio) for each in mode.categories]
    rows.append(("geometric mean", mode.plain, mode.stats, mode.mean))
    for number, (name, plain, stats, ratio) in enumerate(rows, 1):
        if number == len(rows):
            table.add_section()
        table.add_row(
            name,
            str(stats.answers),
            f"{plain.decode_tokens_per_second:.1f}",
            f"{stats.decode_tokens_per_second:.1f}",
            ratio_text(ratio),
            f"{stats.tokens_per_pass:.2f}",
            acceptance_text(stats.draft_counts),
            style="bold" if number == len(rows) else None,
        )
    return table


def _drafters(result: BenchResult) -> Table:
    table = _table("draft tokens by drafter", "", "drafter", "verified", "accepted", "")
    for mode in result.modes:
        for number, (name, counts) in enumerate(mode.stats.by_source.items()):
            shown = mode.name if number == 0 else ""
            table.add_row(shown, name, str(counts.drafted), str(counts.accepted), acceptance_text(counts))
        table.add_section()
    return table


def _rounds(result: BenchResult) -> Table:
    table = _table("milliseconds per round", "", "draft passes", "target pass", "host", "total", "rounds")
    for name, stats in result.stats.items():
        table.add_row(name, *(f"{part:.2f}" for part in round_ms(stats).values()), str(stats.decode_passes))
    return table


def _depths(result: BenchResult) -> Table:
    deepest = min(max(len(mode.stats.by_depth) for mode in result.modes), _MAX_DEPTH)
    table = _table("acceptance rate by depth in the draft", "", *map(str, range(1, deepest + 1)))
    for mode in result.modes:
        counts = [*mode.stats.by_depth, *[DraftCounts()] * deepest][:deepest]
        table.add_row(mode.name, *map(acceptance_text, counts))
    return table
