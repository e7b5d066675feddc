"""A measurement on the terminal."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.table import Table

from .bench_result import Result
from .ratios import PLAIN, Account, Count, Estimate

_DEPTHS: Final = 8


def show(console: Console, result: Result) -> None:
    """Print the tables and what has to be known beside them."""
    conditions = result.conditions
    draft = f", draft {conditions.draft_shown}" if conditions.draft else ""
    console.print(f"[bold]{conditions.model}[/bold]{draft}, {conditions.device}; {conditions.source}")
    for account in result.accounts:
        console.print(_categories(account))
    if len(result.accounts) > 1:
        console.print(_modes(result))
    sources = _sources(result)
    if sources.row_count:
        console.print(sources)
    console.print(_rounds(result))
    if any(account.run.by_depth for account in result.accounts):
        console.print(_depths(result))
    for note in result.notes:
        console.print(f"  {note}", highlight=False, soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", min_width=len(title))
    table.add_column(columns[0])
    for name in columns[1:]:
        table.add_column(name, justify="right")
    return table


def times(estimate: Estimate) -> str:
    """A ratio with its interval."""
    if estimate.interval is None:
        return f"{estimate.value:.2f}"
    low, high = estimate.interval
    return f"{estimate.value:.2f} [{low:.2f}, {high:.2f}]"


def within(estimate: Estimate) -> str:
    """An interval in words."""
    return "-" if estimate.interval is None else "{:.2f} to {:.2f}".format(*estimate.interval)


def share(count: Count) -> str:
    """An acceptance, in per cent."""
    return f"{count.share:.0%}" if count.drafted else "-"


def _categories(account: Account) -> Table:
    table = _table(
        f"{account.name} against plain decoding, tokens a second",
        *("", "answers", "plain", account.name, "ratio", "tokens a pass", "accepted"),
    )
    for each in account.categories:
        table.add_row(
            each.name,
            str(each.answers),
            f"{each.plain.rate:.1f}",
            f"{each.run.rate:.1f}",
            times(each.ratio),
            f"{each.run.tokens_per_pass:.2f}",
            share(each.run.candidates),
        )
    table.add_section()
    table.add_row(
        "geometric mean",
        str(account.answers),
        f"{account.plain.rate:.1f}",
        f"{account.run.rate:.1f}",
        times(account.mean),
        f"{account.run.tokens_per_pass:.2f}",
        share(account.run.candidates),
        style="bold",
    )
    return table


def _modes(result: Result) -> Table:
    table = _table("times plain decoding", "", *(account.name for account in result.accounts))
    for rows in zip(*(account.categories for account in result.accounts), strict=True):
        table.add_row(rows[0].name, *(f"{each.ratio.value:.2f}" for each in rows))
    table.add_section()
    table.add_row("geometric mean", *(f"{account.mean.value:.2f}" for account in result.accounts), style="bold")
    return table


def _sources(result: Result) -> Table:
    table = _table("guesses by who made them", "", "drafter", "verified", "accepted", "")
    for account in result.accounts:
        for number, (name, count) in enumerate(account.run.by_source.items()):
            mode = account.name if number == 0 else ""
            table.add_row(mode, name, str(count.drafted), str(count.accepted), share(count))
        table.add_section()
    return table


def _rounds(result: Result) -> Table:
    table = _table("milliseconds a round", "", "draft passes", "target pass", "host", "all", "rounds")
    runs = {PLAIN: result.plain, **{account.name: account.run for account in result.accounts}}
    for name, run in runs.items():
        parts = (run.draft_s, run.target_s, run.between_s, run.seconds)
        table.add_row(name, *(f"{run.each_pass_ms(seconds):.2f}" for seconds in parts), str(run.passes))
    return table


def _depths(result: Result) -> Table:
    deepest = max(len(account.run.by_depth) for account in result.accounts)
    shown = min(deepest, _DEPTHS)
    table = _table("accepted, by depth", "", *map(str, range(1, shown + 1)))
    for account in result.accounts:
        counts = [*account.run.by_depth, *[Count()] * shown][:shown]
        table.add_row(account.name, *map(share, counts))
    return table
