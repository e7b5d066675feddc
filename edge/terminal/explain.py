"""`--explain`: the account of every round, as a table on standard error."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table

from ...runtime.graph.graph_io import GraphIO, LogitsMode
from ...runtime.speculation.choice import SOURCE_NAMES
from ...runtime.speculation.speculator import Round
from ...runtime.speculation.tree import Source

_WIDTH = 130


def show_rounds(rounds: Sequence[Round | None], spec: GraphIO) -> None:
    """Print one line a round of a model with these ports; rounds alike in having nothing to tell are told together."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    if not spec.supports_verification:
        why = "scores its last row only" if spec.logits_mode is LogitsMode.LAST else "takes one new row at a time"
        console.print(f"no rounds: this graph {why}, so guesses cannot be verified; edge-run export may upgrade it")
        return
    if not rounds:
        console.print("no rounds: the first token ended the answer, or nothing was to guess ahead")
        return
    table = Table(title="round by round, after the first token", box=None, pad_edge=False, header_style="bold")
    table.add_column("round", justify="right")
    table.add_column("candidates")
    for name in ("tokens\nexpected", "rows\nrun", "guesses\naccepted", "draft\nms", "target\nms", "host\nms"):
        table.add_column(name, justify="right")
    table.add_column("")
    number = 0
    for kind, group in groupby(rounds, key=_kind):
        members = list(group)
        if kind is None:
            for one in members:
                number += 1
                assert one is not None  # noqa: S101  a round of no kind of its own
                table.add_row(str(number), *_cells(one))
        else:
            first, number = number + 1, number + len(members)
            table.add_row(f"{first}-{number}" if number > first else f"{first}", "", "1", "1", "", "", "", "", kind)
    console.print(table)


def _kind(one: Round | None) -> str | None:
    """What rounds that can be told together have in common; None for a round with something of its own."""
    if one is None:
        return "plain: drafting rests, it promises less than it costs"
    if one.rows == 1 and not any(one.candidates) and not one.draft_passes:
        return f"plain: {one.note or 'no candidates'}"
    return None


def _cells(one: Round) -> tuple[str, ...]:
    note = one.note
    if one.rows == 1 and not note:
        note = "no guess pays for its row"
    return (
        _sources(one.candidates),
        f"{one.expected:.2f}",
        str(one.rows),
        f"{sum(one.accepted)}/{one.rows - 1} {_sources(one.accepted)}".strip() if one.rows > 1 else "",
        f"{one.draft_s * 1e3:.2f}" if one.draft_passes else "",
        f"{one.target_s * 1e3:.2f}",
        f"{one.host_s * 1e3:.2f}",
        note,
    )


def _sources(counts: Sequence[int]) -> str:
    return " ".join(
        f"{SOURCE_NAMES.get(Source(source), 'other')}:{count}" for source, count in enumerate(counts) if count
    )
