"""`edge-run export SRC OUT`: a Hugging Face checkpoint, a GGUF file or a foreign ONNX model to a model folder that
edge-run runs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ...errors import InputError
from ...models.find import is_on_hub
from ...models.hub.model_id import parse_hub_id
from ...models.manifest import GraphLayout, WeightFormat
from ..terminal.report_summary import show_report
from .export_options import LayersChoice, MethodChoice, WeightChoice, calibration_file, draft_request
from .offline import Offline

if TYPE_CHECKING:
    from ...export import ExportResult


_USUAL_BLOCK: Final = 32
"""Weights that share a scale unless asked otherwise; in a GGUF file it is always as many."""
_MIX: Final = "Mixed weights"
_CALIBRATION: Final = "Calibration"
_DRAFT: Final = "Draft"
_UNTOLD: Final = ("offline", "debug", "work")
"""Options that make no difference to what is written."""


def export(
    context: typer.Context,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC",
            help="A checkpoint folder, a .gguf file, an .onnx file or its folder, or org/name on the Hugging Face Hub.",
        ),
    ],
    destination: Annotated[Path, typer.Argument(metavar="OUT", help="The model folder to write.")],
    weights: Annotated[
        WeightChoice | None,
        typer.Option(help="How the weights are stored.", show_default="int4; .gguf and .onnx keep what is in few bits"),
    ] = None,
    block: Annotated[int, typer.Option(help="Weights that share a scale: 32, 64 or 128.")] = _USUAL_BLOCK,
    head: Annotated[
        WeightChoice | None,
        typer.Option(help="How LM head and embedding are stored.", show_default="as the other weights"),
    ] = None,
    method: Annotated[
        MethodChoice | None,
        typer.Option(
            help="How codes and scales of few bits are chosen; gptq and awq observe the model on text first.",
            show_default="k-quant for int4 and int2, rtn for int8",
        ),
    ] = None,
    zero_points: Annotated[
        bool, typer.Option("--zero-points", help="Let each block say which code stands for 0.")
    ] = False,
    powers_of_two: Annotated[
        bool, typer.Option("--powers-of-two", help="Make scales powers of two, for hardware that shifts.")
    ] = False,
    longest: Annotated[
        int | None,
        typer.Option("--context", min=1, help="Longest context to serve.", show_default="the model's, at most 32768"),
    ] = None,
    layout: Annotated[
        GraphLayout, typer.Option(help="Whose graph to write: edge-run's own, or one that ONNX Runtime GenAI opens.")
    ] = GraphLayout.EDGE,
    report: Annotated[
        bool,
        typer.Option(
            "--report", help="Write report.html and report.json, as calibrated and mixed exports do in any case."
        ),
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(help="What mixed weights may take: 3.5bpw, 300MB or 9ms.", rich_help_panel=_MIX),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="A plan file to follow, as an export with mixed weights writes it.", rich_help_panel=_MIX),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            "--time-limit", min=0, help="Minutes that the search may take.", show_default="10", rich_help_panel=_MIX
        ),
    ] = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Repair units of 2 bits by low-rank factors where that wins.", rich_help_panel=_MIX
        ),
    ] = False,
    bandwidth: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="GB/s of another machine, for which the report says what the mix would give.",
            rich_help_panel=_MIX,
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|self",
            help="Text to observe the model on: a text file, .jsonl conversations, or the model's own words.",
            show_default="self, where it is needed",
            rich_help_panel=_CALIBRATION,
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--calibration-tokens",
            min=1,
            help="Most tokens of it.",
            show_default="16384",
            rich_help_panel=_CALIBRATION,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Of the model's own words, and of the search.", rich_help_panel=_CALIBRATION)
    ] = 0,
    work: Annotated[
        Path | None,
        typer.Option(
            help="Folder for what is found out on the way; it is kept, so that the next export is quicker.",
            show_default="one in the cache, removed in the end",
            rich_help_panel=_CALIBRATION,
        ),
    ] = None,
    draft: Annotated[
        Path | None,
        typer.Option(
            metavar="SRC",
            help="Checkpoint of a draft model, also on the hub, which becomes part of OUT.",
            rich_help_panel=_DRAFT,
        ),
    ] = None,
    draft_weights: Annotated[
        WeightChoice | None,
        typer.Option(
            help="How the draft's weights are stored.", show_default="as the target's, or int4", rich_help_panel=_DRAFT
        ),
    ] = None,
    draft_vocab: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Tokens that the draft's head keeps: those that the target uses most.",
            show_default="all",
            rich_help_panel=_DRAFT,
        ),
    ] = None,
    draft_layers: Annotated[
        LayersChoice | None,
        typer.Option(help="Make a draft of the target itself, without some of its layers.", rich_help_panel=_DRAFT),
    ] = None,
    offline: Offline = False,  # noqa: ARG001  its callback acts
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")] = False,  # noqa: ARG001
) -> None:
    """Export a checkpoint or a GGUF file, or upgrade an ONNX model that another tool exported.

    OUT is written whole or not at all; a model that stood there is replaced only when the new one has passed its check
    against a reference decoder, or against the ONNX model as it was.

    Examples:

    edge-run export Qwen2.5-0.5B-Instruct my-model --weights int4 --block 64 --head int8

    edge-run export Qwen2.5-0.5B-Instruct my-model --weights mixed --budget 3.5bpw --time-limit 20

    edge-run export Qwen2.5-1.5B-Instruct my-model --draft Qwen2.5-0.5B-Instruct --draft-vocab auto

    edge-run export Phi-3-mini-4k-instruct-onnx/cpu-int4 my-model

    edge-run export optimum-export/model.onnx my-model --weights int4

    edge-run export Qwen/Qwen2.5-0.5B-Instruct my-model
    """
    try:
        from ...export import (
            DEFAULT_CALIBRATION_TOKENS,
            CalibrationRequest,
            ExportRecipe,
            ExportRequest,
            MixedPrecisionRequest,
            export_model,
            find_source,
            may_be_quantized,
            parse_budget,
        )
    except ModuleNotFoundError as error:
        raise InputError(f"export needs the package {error.name}", 'pip install "edge-run[export]"') from error

    asked = source.as_posix()
    name = asked if is_on_hub(asked) else source.resolve().name
    source = find_source(_on_disk(source))
    mixed = weights is WeightChoice.MIXED or plan is not None
    _require_mix(mixed, weights, context)
    if weights is None and not may_be_quantized(source):
        weights = WeightChoice.INT4
    if weights is None and head is None and block != _USUAL_BLOCK:
        raise InputError(
            f"--block {block} says nothing without --weights or --head", "add --weights int8, int4 or int2"
        )

    def form(choice: WeightChoice | None) -> WeightFormat | None:
        return None if choice is None else choice.in_blocks_of(block, zero_points, powers_of_two)

    mix = calibrated = None
    if mixed:
        mix = MixedPrecisionRequest(
            budget=None if budget is None else parse_budget(budget),
            plan=plan,
            max_seconds=None if minutes is None else 60 * minutes,
            low_rank_correction=repair,
            zero_points=zero_points,
            powers_of_two=powers_of_two,
            bandwidth=None if bandwidth is None else bandwidth * 1e9,
        )
    if calibration is not None or tokens is not None or seed:
        calibrated = CalibrationRequest(calibration_file(calibration), tokens or DEFAULT_CALIBRATION_TOKENS, seed)
    small = draft_request(draft, draft_vocab, draft_layers, form(draft_weights))
    if small is not None and small.source is not None:
        small = replace(small, source=find_source(_on_disk(small.source)))
    recipe = ExportRecipe(
        body=form(WeightChoice.INT4 if mixed else weights),
        head=form(head),
        context=longest,
        method=None if method is None else method.rounding,
        layout=layout,
        calibration=calibrated,
        awq=method is not None and method.folded,
        mixed_precision=mix,
        draft=small,
        report=report,
        work_folder=work,
    )
    with _progress_bar() as progress:
        said = _command(context, name, _meant(None if mixed else weights, head, block))
        request = ExportRequest(source, destination, recipe, said)
        finished = export_model(request, progress)
    _show(finished)


def _on_disk(named: Path) -> Path:
    """The path that was named, or where a checkpoint of the hub by that name was downloaded to.

    Raises:
        EdgeError: the hub does not give it.
    """
    asked = named.as_posix()
    if not is_on_hub(asked):
        return named
    from ...models.hub.fetch import fetch_checkpoint

    return fetch_checkpoint(parse_hub_id(asked))


def _require_mix(mixed: bool, weights: WeightChoice | None, context: typer.Context) -> None:
    """Check that options about mixed weights come with them, and those about one format without."""
    if mixed and weights not in (None, WeightChoice.MIXED):
        raise InputError(f"--plan and --weights {weights.value} contradict each other", "leave one of them out")
    # The blocks of a mix are chosen too, but those of the draft's weights are not.
    of_one_format = ("head",) if _is_typed(context, "draft_weights") else ("head", "block")
    strange = _typed(context, of_one_format if mixed else ("budget", "minutes", "repair", "bandwidth"))
    if strange and mixed:
        raise InputError(f"with mixed weights, {strange[0]} says nothing", "leave it out")
    if strange:
        raise InputError(f"{strange[0]} says nothing without mixed weights", "add --weights mixed")


def _typed(context: typer.Context, names: Collection[str]) -> list[str]:
    """How those of the options are spelled that were on the command line."""
    return [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in names and _is_typed(context, parameter.name)
    ]


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _meant(weights: WeightChoice | None, head: WeightChoice | None, block: int) -> dict[str, object]:
    """The weights of an export by the names of the options, whether they were typed or not."""
    blocks = any(choice not in (None, WeightChoice.FP32) for choice in (weights, head))
    return {} if weights is None else {"weights": weights, **({"block": block} if blocks else {})}


def _command(context: typer.Context, name: str, meant: Mapping[str, object]) -> str:
    """What was typed, and what was `meant` unsaid, for the manifest.

    Files are there by their last name, so that no private path is published.
    """
    words = ["edge-run", "export", name, context.params["destination"].resolve().name]
    for parameter in context.command.params:
        if parameter.name is None or not parameter.opts[0].startswith("--") or parameter.name in _UNTOLD:
            continue
        if parameter.name in meant or _is_typed(context, parameter.name):
            value = meant.get(parameter.name, context.params[parameter.name])
            words.append(parameter.opts[0])
            words += [] if value is True else [_spelled(value)]
    return shlex.join(words)


def _spelled(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return value.name if isinstance(value, Path) else str(value)


class _Bar:
    """Shows each stage of an export as a bar of its own."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, fraction: float) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=1.0)
        self._progress.update(self._tasks[stage], completed=fraction)


@contextmanager
def _progress_bar() -> Iterator[_Bar]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        yield _Bar(progress)


def _show(report: ExportResult) -> None:
    size = sum(report.file_bytes.values()) / 1e6
    parity = ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in report.parity.as_mapping().items())
    typer.echo(
        f"{report.bundle}: {size:.1f} MB, {report.bits_per_weight:.2f} bits a weight on disk, {report.seconds:.1f} s"
    )
    typer.echo(f"against the reference: {parity}")
    if report.report is not None:
        show_report(Console(), report.report)
    for note in report.notes:
        typer.echo(note)
