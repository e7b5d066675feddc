"""`edge-run export SRC OUT`: exports a model to a folder that edge-run runs."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from ...errors import missing_extra
from ...export.quantization.option_values import PRESETS, PresetChoice, WeightChoice
from ...export.recipe import DEFAULT_BLOCK, NO_DRAFT, OWN_MODULE, ExportRecipe
from ...models.find import is_on_hub, record_export
from ...models.hub.downloaded_model import parse_hub_id
from ...models.progress import LINE_PREFIX, ProgressDisplay
from ..terminal.output import SafeConsole, write_error, write_line
from ..terminal.report_summary import show_export
from .command_line import ALIASES, COMMANDS
from .shared_options import OptionsOf, takes_options

_RECIPE: Final = OptionsOf(ExportRecipe())
_UNRECORDED: Final = ("offline", "debug", "work", "preset")
"""Options that the manifest leaves out: they do not change what is written, or stand for others, which it names."""


@takes_options(_RECIPE, offline=True)
def export(
    command_line: typer.Context,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC",
            help="A checkpoint folder, a .gguf file, an .onnx file or its folder, or org/name on the Hugging Face Hub.",
        ),
    ],
    destination: Annotated[Path, typer.Argument(metavar="OUT", help="The model folder to write.")],
    **given: Any,
) -> None:
    """Export a checkpoint or a GGUF file, or upgrade an ONNX model that another tool exported.

    OUT appears whole or not at all. It replaces an earlier model only after passing its check against a reference
    decoder, or against the original ONNX model.

    Examples:

    \b
    edge-run export Qwen/Qwen2.5-0.5B-Instruct my-model --preset balanced
    edge-run export Qwen/Qwen2.5-0.5B-Instruct my-model --weights int4 --block 64 --head int8
    edge-run export Qwen/Qwen2.5-0.5B-Instruct my-model --weights mixed --budget 3.5bpw
    edge-run export Qwen/Qwen2.5-0.5B-Instruct my-model --weights mixed --budget 280MB@file --half-scales --zero-points
    edge-run export Qwen/Qwen2.5-1.5B-Instruct my-model --draft Qwen/Qwen2.5-0.5B-Instruct
    edge-run export Qwen/Qwen3.5-0.8B my-model --draft mtp --draft-weights int8
    edge-run export Qwen/Qwen3.5-0.8B my-model --draft-vocab 65536 --calibration chats.jsonl
    edge-run export Qwen/Qwen3-1.7B my-model --draft AngelSlim/Qwen3-1.7B_eagle3
    edge-run export Qwen/Qwen2.5-0.5B-Instruct my-model --device gpu
    edge-run export Qwen/Qwen2.5-0.5B-Instruct my-model --device npu --widths 1,4,128 --contexts 512,2048
    edge-run export Qwen/Qwen2.5-0.5B-Instruct my-model --weights int8 --device npu --activations int16
    edge-run export ./Phi-3-mini-4k-instruct-onnx/cpu-int4 my-model
    edge-run export optimum-export/model.onnx my-model --weights int4
    edge-run export Qwen/Qwen2.5-0.5B-Instruct my-model
    """
    with missing_extra("export", "export"):
        from ...export.pipeline import export_model, find_source, may_be_quantized
        from ...export.report.expected_duration import expected_duration

    recipe = _RECIPE.record(given)
    if recipe.draft is not None and recipe.draft not in (NO_DRAFT, OWN_MODULE):
        recipe = replace(recipe, draft=_on_disk(Path(recipe.draft)))
    found = find_source(_on_disk(source))
    recorded = {} if recipe.preset is None else dict(PRESETS[PresetChoice(recipe.preset)])
    if not recipe.mixed and (recipe.weights is not None or not may_be_quantized(found)):
        # The weights are recorded even if they are the default, which another version may change.
        recorded["weights"] = recipe.weights or WeightChoice.INT4
        if any(choice not in (None, WeightChoice.FP32) for choice in (recorded["weights"], recipe.head)):
            recorded["block"] = recipe.block or DEFAULT_BLOCK
    command = _recorded(command_line, source, recorded)
    if (expected := expected_duration(found, recipe)) is not None:
        write_error(f"{LINE_PREFIX}{expected}")
    with ProgressDisplay(lines=True) as progress:
        result = export_model(found, destination, recipe, progress, command=command)
    record_export(result.bundle)
    show_export(SafeConsole(), result)
    # A word alone would be taken for a command or an option, where it is one.
    named = str(destination)
    run = os.path.join(os.curdir, named) if named in {*COMMANDS, *ALIASES} or named.startswith("-") else named
    write_line(f"to run it: edge-run {shlex.quote(run)}")


def _recorded(command_line: typer.Context, source: Path, defaults: Mapping[str, Any]) -> str:
    """The command for the manifest: what was typed, and `defaults` that were not.

    Paths are shortened to their last name, so that no private path is published.
    """
    given = command_line.params
    model = source.as_posix() if is_on_hub(source.as_posix()) else _real_name(source)
    words = ["edge-run", "export", model, _real_name(given["destination"])]
    for parameter in command_line.command.params:
        name, origin = str(parameter.name), command_line.get_parameter_source(str(parameter.name))
        if parameter.opts[0].startswith("--") and name not in _UNRECORDED:
            typed = origin is not None and origin.name == "COMMANDLINE"
            if name in defaults or typed:
                value = defaults.get(name, given[name])
                is_path = isinstance(value, Path) or (name == "draft" and not is_on_hub(value))
                words.append(parameter.opts[0])
                words += [] if value is True else [Path(value).name if is_path else str(value)]
    return shlex.join(words)


def _real_name(path: Path) -> str:
    """The last name of a path, also of `.`; other than `Path.resolve`, no error for links that lead to each other."""
    return os.path.basename(os.path.realpath(path))


def _on_disk(source: Path) -> Path:
    """The path itself, or the folder to which a checkpoint of the hub was downloaded.

    Raises:
        EdgeError: the hub does not give the checkpoint.
    """
    name = source.as_posix()
    if not is_on_hub(name):
        return source
    from ...models.hub.fetch import fetch_checkpoint

    return fetch_checkpoint(parse_hub_id(name))
