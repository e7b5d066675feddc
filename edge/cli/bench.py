"""`edge-run bench MODEL`: plain decoding against speculative decoding on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ...errors import InputError
from ...models.pairing import find_draft
from ...runtime.engine import load
from ...runtime.speculation.choice import Speculation

if TYPE_CHECKING:
    from ..bench.bench_result import Result
    from ..bench.prompt_sets import Conversation
    from ..bench.runner import Plan

_PIPE_WIDTH: Final = 110
_MOST: Final = 256
_WHOLE: Final = 1 << 20
"""A recorded answer is measured whole: it copies more, the longer it gets."""


def bench(
    model: Annotated[
        str | None,
        typer.Argument(help="An .onnx file, a model folder, or org/name on the hub.", show_default="the bundled model"),
    ] = None,
    draft: Annotated[
        str, typer.Option(help="Draft model: a folder, auto for the one paired with MODEL, or none.")
    ] = "auto",
    prompts: Annotated[
        Path | None,
        typer.Option(help="Spec-Bench, HumanEval or GSM8K JSON lines, or plain text.", show_default="a set of our own"),
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Recorded conversations: every pass runs, the tokens are the recording's.")
    ] = None,
    spec: Annotated[
        list[str] | None,
        typer.Option(help="Speculation to measure, as edge-run --spec; may be repeated.", show_default="auto"),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("-n", "--max-tokens", min=2, help="Most tokens an answer.", show_default="256; replay: the whole"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Most conversations of each category.", show_default="all")
    ] = None,
    turns: Annotated[str, typer.Option(help="Turns to measure: all, 2, 1-2 or 2-.")] = "all",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompts as they are, without template.")] = False,
    temperature: Annotated[float, typer.Option("-t", "--temperature", min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, gpu, npu, or an execution provider's name.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Compute threads.", show_default="one per physical core")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of a conversation.", show_default="what the model allows")
    ] = None,
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Keep weights packed for this machine on disk.")
    ] = True,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="tokenizer.json, or a folder with one.", show_default="the one beside the model"),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write tables and plots to this .html, or plots to .png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")] = False,  # noqa: ARG001
) -> None:
    """Measure what speculation gains: plain against speculative decoding, prompt by prompt in one run.

    Prints tables by category and drafter, then one JSON line. Speeds are those of writing, after the first token.

    Example: edge-run bench my-model --prompts spec_bench.jsonl --limit 5 --spec auto --spec suffix --report bench.html
    """
    from ...runtime.measure.machine import load as machine_load
    from ..bench.bench_result import Conditions, Result
    from ..bench.runner import Contender, Plan, TurnRange, measure
    from ..bench.table import show

    write_report = _reporter(report)
    busy = machine_load()
    most = max_tokens or (_MOST if replay is None else _WHOLE)
    plan = Plan(most, TurnRange.parse(turns), replay is not None, raw, temperature, seed)
    contenders = [Contender(str(each), each) for each in dict.fromkeys(map(Speculation.parse, spec or ["auto"]))]
    conversations, source = _conversations(model, prompts, replay, limit, plan)
    with load(model, draft=draft, learned=False, device=device, threads=threads, context=context,
              cache=cache, tokenizer=tokenizer) as engine:  # fmt: skip
        pair = find_draft(engine.bundle, draft)
        with _progress() as progress:
            found = measure(engine, conversations, contenders, plan, progress)
        conditions = Conditions(
            model=engine.bundle.folder.name,
            draft=None if pair is None else pair.name,
            device=str(engine.device),
            threads=threads,
            context=engine.context,
            source=source,
            replay=plan.replay,
            max_tokens=most,
            turns=turns,
            temperature=temperature,
            conversations=len(conversations),
            draft_head=None if pair is None or pair.target_ids is None else pair.target_ids.size,
        )
        result = Result.of(found, conditions, engine, busy)
    if not as_json:
        console = Console()
        if not console.is_terminal:
            console.width = max(console.width, _PIPE_WIDTH)
        show(console, result)
    print(json.dumps(result.as_mapping(), ensure_ascii=False))  # noqa: T201
    if write_report is not None:
        write_report(result)


def _reporter(path: Path | None) -> Callable[[Result], None] | None:
    """Checks that a report can be written before an hour is spent on measuring for it.

    Raises:
        InputError: it cannot.
    """
    if path is None:
        return None
    from ..bench.report_name import check_report_name

    check_report_name(path)
    try:
        from ..bench.report import write_report
    except ModuleNotFoundError as error:
        raise InputError(f"a report needs the package {error.name}", 'pip install "edge-run[bench]"') from error
    return lambda result: write_report(path, result)


def _conversations(
    model: str | None, prompts: Path | None, replay: Path | None, limit: int | None, plan: Plan
) -> tuple[Sequence[Conversation], str]:
    """What is asked, and what it is called.

    Raises:
        InputError: the file cannot be used, both are given, or no turn would be measured.
    """
    from ..bench.prompt_sets import chosen, our_prompts, read_prompts
    from ..bench.recordings import read_recording

    if prompts is not None and replay is not None:
        raise InputError("both --prompts and --replay are given", "measure them one after the other")
    if replay is not None:
        read, source = read_recording(replay), replay.name
    elif prompts is not None:
        read, source = read_prompts(prompts), prompts.name
    else:
        read, source = our_prompts(for_shell=model is None), "edge-run's own prompts"
    conversations = [each for each in chosen(read, limit) if plan.measured(each)]
    if not conversations:
        raise InputError(f"no conversation of {source} has such a turn", "give other --turns")
    return conversations, source


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    columns = (
        TextColumn("measuring"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("turns"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("measuring", total=None)
        yield lambda done, todo: progress.update(task, completed=done, total=todo)
