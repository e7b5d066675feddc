"""`edge-run verify MODEL`: whether guessing ahead changes what a model writes on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ...runtime.engine import Engine, load
from ...runtime.measure.exactness import ComparisonCounts, Counterexample, ExactnessReport
from ..terminal.output import for_terminal

_KINDS: Final = {"greedy": "greedy", "sampled": "sampled", "exact": "greedy with --exact"}


def verify(
    model: Annotated[
        str | None,
        typer.Argument(help="An .onnx file, a model folder, or org/name on the hub.", show_default="the bundled model"),
    ] = None,
    draft: Annotated[
        str, typer.Option(metavar="MODEL", help="Draft model: a folder, auto (the one MODEL names), or none.")
    ] = "auto",
    prompts: Annotated[
        Path | None,
        typer.Option(help="Spec-Bench, HumanEval or GSM8K JSON lines, or plain text.", show_default="a set of our own"),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most prompts of each category.")] = 3,
    max_tokens: Annotated[int, typer.Option("-n", "--max-tokens", min=2, help="Most tokens an answer.")] = 64,
    device: Annotated[str, typer.Option(help="auto, cpu, gpu, npu, or an execution provider's name.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Compute threads.", show_default="one per physical core")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of a conversation.", show_default="what the model allows")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="tokenizer.json, or a folder with one.", show_default="the one beside the model"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")] = False,  # noqa: ARG001
) -> int:
    """Check that speculation leaves the text as it is, and say how sure that is.

    Passes over several tokens are compared with passes over one, and the texts that come of guesses of all kinds with
    plain ones. Texts may only part at near-ties, between scores that passes over one and several tokens can swap; with
    --exact they may not part at all. What was found is kept for --exact, and edge-run inspect shows it. Exit code 1
    means that a text parted elsewhere.

    Example: edge-run verify my-model --prompts spec_bench.jsonl --limit 10
    """
    from ...runtime.measure.comparison import Comparison
    from ..bench.prompt_sets import chosen, our_prompts, read_prompts
    from ..bench.runner import Asking, Plan

    read = our_prompts(for_shell=model is None) if prompts is None else read_prompts(prompts)
    conversations = chosen(read, limit)
    with load(model, draft=draft, device=device, threads=threads, context=context, tokenizer=tokenizer) as engine:
        asking = Asking(engine, Plan(max_tokens))
        asked = [asking.ask((), each.exchanges[0]).prompt for each in conversations]
        with _progress_bar() as progress:
            exactness_report = Comparison(engine, max_tokens).certify(asked, progress)
        engine.model.drafters.store_exactness_report(exactness_report)
        if as_json:
            print(json.dumps(facts(engine, exactness_report), ensure_ascii=False))  # noqa: T201
        else:
            _show(engine, exactness_report, [each.exchanges[0].prompt for each in conversations])
    return 0 if exactness_report.passed else 1


def facts(engine: Engine, exactness_report: ExactnessReport) -> dict[str, Any]:
    """A certificate as plain values."""
    return {
        "model": str(engine.bundle.folder),
        "device": str(engine.device),
        "verdict": verdict(exactness_report),
        **exactness_report.to_json(),
    }


def verdict(exactness_report: ExactnessReport) -> str:
    """A certificate in a few words."""
    counts = [
        count
        for count in (exactness_report.greedy, exactness_report.sampled, exactness_report.exact)
        if count is not None
    ]
    texts, tied = sum(count.texts for count in counts), sum(count.tied for count in counts)
    failed = sum(count.failed for count in counts)
    ties = f"ties below {exactness_report.epsilon:.3g}"
    if not exactness_report.noise.sound:
        return "FAILED: passes over several tokens compute something else than passes over one"
    if failed:
        return f"FAILED: {failed} of {texts} texts differ where there is no tie below {exactness_report.epsilon:.3g}"
    if exactness_report.noise.identical and not tied:
        return "bit-identical"
    if not texts:
        return f"identical up to {ties}, as far as one text shows; edge-run verify compares more"
    return f"identical up to {ties} ({tied} of {texts} texts differ{', each at a tie' if tied else ''})"


def _show(engine: Engine, exactness_report: ExactnessReport, prompts: Sequence[str]) -> None:
    noise = exactness_report.noise
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    widths = ", ".join(f"{width}: {value:.2g}" for width, value in noise.chains.items())
    table.add_row("logits", f"differ by rows a pass at most {widths}; in trees {noise.trees:.2g}")
    table.add_row(
        "", f"with the cache's last bits disturbed {noise.disturbed:.2g}; their own spread is {noise.spread:.2g}"
    )
    table.add_row(
        "rows", "keep to themselves" if not noise.leak else f"see others that they should not: {noise.leak:.2g}"
    )
    for kind, name in _KINDS.items():
        count = getattr(exactness_report, kind)
        if count is not None:
            table.add_row(name, _counted(count))
    console = Console(highlight=False)
    console.print(table)
    if exactness_report.counterexample is not None:
        console.print(_told(engine, exactness_report.counterexample, prompts), markup=False)
    console.print(verdict(exactness_report), style="bold", markup=False)


def _counted(count: ComparisonCounts) -> str:
    parts = [f"{count.identical} of {count.texts} texts identical"]
    if count.tied:
        parts.append(f"{count.tied} part at a tie, the clearest of {count.widest_tie:.2g}")
    if count.failed:
        parts.append(f"{count.failed} part elsewhere")
    parts.append(f"{count.accepted} of {count.candidates} guesses taken")
    if count.again:
        parts.append(f"{count.again} rows run again")
    return ", ".join(parts)


def _told(engine: Engine, found: Counterexample, prompts: Sequence[str]) -> str:
    """A counterexample as a sentence."""
    expected, other = (
        json.dumps(engine.tokenizer.decode([token]), ensure_ascii=False) if token >= 0 else "nothing"
        for token in (found.expected, found.found)
    )
    how = f"with seed {found.seed}" if found.kind == "sampled" else _KINDS[found.kind]
    return for_terminal(
        f"{how}, guesses by {found.drafter}: token {found.position + 1} of the answer is {other} and not {expected}, "
        f"{found.gap:.3g} apart, for the prompt {json.dumps(prompts[found.prompt], ensure_ascii=False)}"
    )


@contextmanager
def _progress_bar() -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, if that is a terminal."""
    shown = sys.stderr is not None and sys.stderr.isatty()
    columns = (TextColumn("comparing"), BarColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as progress:
        task = progress.add_task("comparing", total=None)
        yield lambda done, todo: progress.update(task, completed=done, total=todo)
