"""Prints the rounds of an answer as a table, for `--explain`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.table import Table

from ...runtime.graph.graph_io import GraphIO, LogitsMode
from ...runtime.speculation.choice import SOURCE_NAMES
from ...runtime.speculation.rounds import Round
from ...runtime.speculation.tree import Source
from .output import SafeConsole

_WIDTH = 130


def show_rounds(rounds: Sequence[Round | None], graph_io: GraphIO) -> None:
    """Print one line for each round on standard error; neighbouring plain rounds of one kind share a line.

    Args:
        rounds: the rounds after the first token; None for those in which drafting was disabled.
        graph_io: inputs and outputs of the target's graph.
    """
    console = SafeConsole(stderr=True)
    if not console.is_terminal:
        console.width = _WIDTH
    if not graph_io.supports_verification:
        last_only = graph_io.logits_mode is LogitsMode.LAST
        why = "gives logits of the last token only" if last_only else "takes one new token per pass"
        console.print(f"no rounds: the graph {why}, so it cannot verify drafts; edge-run export may upgrade it")
        return
    if not rounds:
        console.print("no rounds: the answer ended with its first token, or speculation is off")
        return
    ahead = any(each is not None and each.ahead.passes for each in rounds)
    table = Table(title="rounds after the first token", box=None, pad_edge=False, header_style="bold")
    table.add_column("round", justify="right")
    table.add_column("candidates")
    for name in ("expected\ntokens", "pass\nwidth", "draft tokens\naccepted", "draft\nms", "target\nms", "host\nms"):
        table.add_column(name, justify="right")
    if ahead:
        table.add_column("ahead\nkept", justify="right")
        table.add_column("hidden\nms", justify="right")
    table.add_column("")
    number = 0
    for kind, group in groupby(rounds, key=_kind):
        members = list(group)
        if kind is None:
            for each in members:
                number += 1
                assert each is not None  # noqa: S101  only rounds have kind None
                table.add_row(str(number), *_cells(each, ahead=ahead))
        else:
            first, number = number + 1, number + len(members)
            empty = [""] * (6 if ahead else 4)
            table.add_row(f"{first}-{number}" if number > first else f"{first}", "", "1", "1", *empty, kind)
    console.print(table)


def _kind(round_: Round | None) -> str | None:
    """Why a plain round drafted nothing; None for a round that gets a line of its own."""
    if round_ is None:
        return "plain: drafting is disabled for a while, because it cost more than it gained"
    if round_.width == 1 and not any(round_.candidates) and not round_.draft_passes and not round_.ahead.passes:
        return f"plain: {round_.note or 'no candidates'}"
    return None


def _cells(round_: Round, *, ahead: bool) -> tuple[str, ...]:
    before = round_.ahead
    ran = (f"{before.kept}/{before.passes}", f"{before.hidden_s * 1e3:.2f}") if before.passes else ("", "")
    note = round_.note
    if round_.width == 1 and not note:
        note = "no candidate is worth its cost"
    return (
        _sources(round_.candidates),
        f"{round_.expected_tokens:.2f}",
        str(round_.width),
        f"{sum(round_.accepted)}/{round_.width - 1} {_sources(round_.accepted)}".strip() if round_.width > 1 else "",
        f"{round_.draft_s * 1e3:.2f}" if round_.draft_passes or before.passes else "",
        f"{round_.target_s * 1e3:.2f}",
        f"{round_.host_s * 1e3:.2f}",
        *(ran if ahead else ()),
        note,
    )


def _sources(counts: Sequence[int]) -> str:
    return " ".join(
        f"{SOURCE_NAMES.get(Source(source), 'other')}:{count}" for source, count in enumerate(counts) if count
    )
