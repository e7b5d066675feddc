"""`edge-run tune MODEL`: measures what a pass over several rows costs here, which decides how much is drafted."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ...errors import InputError
from ...runtime.engine import Engine, load
from ...runtime.graph.session import SessionConfig
from ...runtime.measure.pass_cost_store import save
from ...runtime.measure.pass_timing import WIDTHS, measure_pass_cost
from ...runtime.speculation.ngram_prior import build_prior
from ...runtime.speculation.pass_cost import BUCKET_ENDS, PassCost
from ..terminal.output import write_error

_CONTEXTS: Final = (384, 1536, 6144, 24576, 98304)
"""One within every context bucket, nearer its end: a conversation spends more time there."""
_MOST_CACHE_BYTES: Final = 512 << 20
"""What the cache may take up unless a context was asked for."""


def tune(
    model: Annotated[
        str | None,
        typer.Argument(help="An .onnx file, a model folder, or org/name on the hub.", show_default="the bundled model"),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, gpu, npu, or an execution provider's name.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Compute threads.", show_default="one per physical core")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=2, help="Longest context to measure.", show_default="what fits in 512 MB"),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Count this text into the model's n-gram prior; may be repeated."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="tokenizer.json, or a folder with one.", show_default="the one beside the model"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")] = False,  # noqa: ARG001
) -> None:
    """Measure what a pass over several tokens costs on this machine, at several contexts, and keep it.

    The first answer of a model does this briefly by itself. Do it again, with nothing else running, when that happened
    on a busy machine. It takes about two seconds a context; large models take longer.

    Texts given with --text are counted into a table of short token sequences that guesses ahead where nothing repeats.
    It replaces the one before, and serves all models with the same tokenizer.

    Example: edge-run tune my-model --context 8192 --text notes.md
    """
    texts = [_read_text(path) for path in text or ()]
    with load(model, device=device, threads=threads, context=context, tokenizer=tokenizer) as engine:
        contexts = _contexts(engine, asked=context is not None)
        with _progress_bar() as progress:
            cost = measure_pass_cost(engine.model.new_sequence().bound, contexts=contexts, progress=progress)
        file = save(cost, engine.bundle, SessionConfig(engine.device, threads or 0))
        prior_bytes = build_prior(engine.bundle, engine.tokenizer, engine.graph_io.vocab_size, texts) if texts else 0
        facts = {
            "model": str(engine.bundle.folder),
            "device": str(engine.device),
            "file": None if file is None else str(file),
            "contexts": describe_cost(cost),
            "ngram_bytes": prior_bytes,
        }
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))  # noqa: T201
        return
    Console(highlight=False).print(_table(cost))
    if prior_bytes:
        Console(highlight=False).print(f"n-gram prior: {prior_bytes / 2**20:.1f} MiB")
    if file is None:
        write_error("edge-run: warning: the cache folder cannot be written, so this is not kept")


def _read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}", "give a text file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text", "convert it first") from error
    if not text.strip():
        raise InputError(f"{path} holds no text", "give another file")
    return text


def describe_cost(cost: PassCost) -> list[dict[str, Any]]:
    """What passes cost, as plain values, for each context bucket that was measured.

    `up_to_context` is null for the bucket without an end. A single guess pays from `one_guess_pays_from` on, the
    probability at which the tokens of a pass over two rows per second, (1 + p) / t(2), are those of one row, 1 / t(1);
    above 1 it never pays.
    """
    return [
        {
            "up_to_context": end if end <= BUCKET_ENDS[-1] else None,
            "rows": list(times),
            "milliseconds": [round(seconds * 1e3, 4) for seconds in times.values()],
            "ratio": [round(seconds / times[1], 4) for seconds in times.values()],
            "one_more_row_milliseconds": round(_one_more_row(times) * 1e3, 4),
            "one_guess_pays_from": round(_one_guess_pays_from(cost, end), 4),
        }
        for end, times in cost.measured.items()
    ]


def context_label(up_to: int | None) -> str:
    """The name of a context bucket."""
    return f"context over {BUCKET_ENDS[-1]}" if up_to is None else f"context to {up_to}"


def _contexts(engine: Engine, *, asked: bool) -> list[int]:
    """Committed rows to measure at."""
    spec = engine.graph_io
    row_bytes = spec.cache_bytes_per_token
    longest = engine.context if asked else min(engine.context, _MOST_CACHE_BYTES // row_bytes)
    fitting = [context for context in _CONTEXTS if context + WIDTHS[-1] <= longest]
    return fitting or [engine.context // 2]


def _one_more_row(times: Mapping[int, float]) -> float:
    """Seconds that a row adds, over all rows measured."""
    widest = max(times)
    return (times[widest] - times[1]) / max(widest - 1, 1)


def _one_guess_pays_from(cost: PassCost, context: int) -> float:
    one, two = cost.curve(context, 2)
    return float(two / one) - 1


def _table(cost: PassCost) -> Table:
    described = describe_cost(cost)
    table = Table("rows", *(context_label(entry["up_to_context"]) for entry in described), box=None, pad_edge=False)
    for rows in sorted({rows for entry in described for rows in entry["rows"]}):
        cells = []
        for entry in described:
            found = dict(zip(entry["rows"], zip(entry["milliseconds"], entry["ratio"], strict=True), strict=True))
            cells.append("{:.3g} ms  {:.2f}x".format(*found[rows]) if rows in found else "-")
        table.add_row(str(rows), *cells)
    table.add_section()
    table.add_row("one more row", *(f"{entry['one_more_row_milliseconds']:.3g} ms" for entry in described))
    table.add_row("one guess pays from", *(_probability(entry["one_guess_pays_from"]) for entry in described))
    return table


def _probability(value: float) -> str:
    return "never" if value > 1 else f"{value:.0%}"


@contextmanager
def _progress_bar() -> Iterator[Callable[[float], None]]:
    """A bar on standard error, if that is a terminal."""
    shown = sys.stderr is not None and sys.stderr.isatty()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as progress:
        task = progress.add_task("measuring", total=1.0)
        yield lambda fraction: progress.update(task, completed=fraction)
