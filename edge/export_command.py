"""`edge-run export SRC OUT`: a Hugging Face checkpoint, a GGUF file or a foreign ONNX model to a model folder that
edge-run runs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ..models.find import is_on_hub
from ..models.hub_id import parse_hub_id
from ..models.manifest import GraphLayout, Method, WeightFormat
from .errors import InputError
from .offline import Offline

if TYPE_CHECKING:
    from ..export import ExportRecipe, ExportReport


_USUAL_BLOCK: Final = 32
"""Weights that share a scale unless asked otherwise; in a GGUF file it is always as many."""


class WeightChoice(str, Enum):
    """How `--weights` and `--head` are spelled."""

    FP32 = "fp32"
    INT8 = "int8"
    INT4 = "int4"
    INT2 = "int2"

    def in_blocks_of(self, block: int) -> WeightFormat:
        """The format this names; fp32 has no blocks."""
        bits = {WeightChoice.FP32: 32, WeightChoice.INT8: 8, WeightChoice.INT4: 4, WeightChoice.INT2: 2}[self]
        return WeightFormat(bits, 0 if self is WeightChoice.FP32 else block)


def export(
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
        Method | None,
        typer.Option(
            help="How codes and scales of few bits are chosen.", show_default="k-quant for int4 and int2, rtn for int8"
        ),
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Longest context to serve.", show_default="the model's, at most 32768")
    ] = None,
    layout: Annotated[
        GraphLayout, typer.Option(help="Whose graph to write: edge-run's own, or one that ONNX Runtime GenAI opens.")
    ] = GraphLayout.EDGE,
    offline: Offline = False,  # noqa: ARG001  its callback acts
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")] = False,  # noqa: ARG001
) -> None:
    """Export a checkpoint or a GGUF file, or upgrade an ONNX model that another tool exported.

    OUT is written whole or not at all; a model that stood there is replaced only when the new one has passed its check
    against a reference decoder, or against the ONNX model as it was.

    Examples:

    edge-run export Qwen2.5-0.5B-Instruct my-model --weights int4 --block 64 --head int8

    edge-run export Phi-3-mini-4k-instruct-onnx/cpu-int4 my-model

    edge-run export optimum-export/model.onnx my-model --weights int4

    edge-run export Qwen/Qwen2.5-0.5B-Instruct my-model
    """
    try:
        from ..export import ExportRecipe, export_model, find_source, has_own_formats
    except ModuleNotFoundError as error:
        raise InputError(f"export needs the package {error.name}", 'pip install "edge-run[export]"') from error

    asked = source.as_posix()
    name = source.resolve().name
    if is_on_hub(asked):
        from ..models.hub import fetch_checkpoint

        name, source = asked, fetch_checkpoint(parse_hub_id(asked))
    source = find_source(source)
    if weights is None and not has_own_formats(source):
        weights = WeightChoice.INT4
    if weights is None and head is None and block != _USUAL_BLOCK:
        raise InputError(
            f"--block {block} says nothing without --weights or --head", "add --weights int8, int4 or int2"
        )
    recipe = ExportRecipe(
        body=None if weights is None else weights.in_blocks_of(block),
        head=None if head is None else head.in_blocks_of(block),
        context=context,
        method=method,
        layout=layout,
    )
    with _progress_bar() as progress:
        report = export_model(source, destination, recipe, progress, _command(name, destination, recipe))
    _show(report)


def _command(name: str, destination: Path, recipe: ExportRecipe) -> str:
    """The export as a command, for the manifest; folders by their last name, so that no private path is published."""
    options = []
    for option, form in (("--weights", recipe.body), ("--head", recipe.head)):
        if form is not None:
            options += [option, "fp32" if form.bits == 32 else f"int{form.bits}"]
    blocks = {form.block for form in (recipe.body, recipe.head_format) if form is not None and form.block}
    options += [part for block in blocks for part in ("--block", str(block))]
    if recipe.method is not None:
        options += ["--method", recipe.method.value]
    if recipe.context is not None:
        options += ["--context", str(recipe.context)]
    if recipe.layout is not GraphLayout.EDGE:
        options += ["--layout", recipe.layout.value]
    return shlex.join(["edge-run", "export", name, destination.resolve().name, *options])


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


def _show(report: ExportReport) -> None:
    size = sum(report.file_bytes.values()) / 1e6
    parity = ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in report.parity.as_mapping().items())
    typer.echo(f"{report.bundle}: {size:.1f} MB, {report.bits_per_weight:.2f} bits a weight, {report.seconds:.1f} s")
    typer.echo(f"against the reference: {parity}")
    for note in report.notes:
        typer.echo(note)
