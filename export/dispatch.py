"""Which way of exporting a source takes, by what it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from ..errors import InputError
from .architectures.family import supported_families
from .gguf import is_gguf
from .optimum_path import export_by_optimum, goes_by_optimum
from .outcome import ExportReport
from .pipeline import export_checkpoint
from .progress import Progress, silent
from .recipe import ExportRecipe
from .upgrade import holds_graph, upgrade_model
from .workbench import Workbench

_HINT: Final = (
    "give a checkpoint folder, a .gguf file, an .onnx file or its folder, or org/name on the Hugging Face Hub"
)
_LATER_PART: Final = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
"""Of a split model the first part is the one to name."""


def find_source(source: Path) -> Path:
    """What is exported where a source is named: itself, or the GGUF file in a folder of nothing else.

    Raises:
        InputError: there is nothing, nothing that can be exported, or more than one GGUF file.
    """
    if not source.exists() and not holds_graph(source):
        raise InputError(f"{source} does not exist", _HINT)
    if source.is_file() and not (is_gguf(source) or holds_graph(source)):
        raise InputError(f"{source} is no model", _HINT)
    if not source.is_dir() or (source / "config.json").is_file() or holds_graph(source):
        return source
    files = [path for path in sorted(source.glob("*.gguf")) if _LATER_PART.search(path.name) is None]
    if len(files) > 1:
        raise InputError(
            f"{source} holds several GGUF files: {', '.join(path.name for path in files)}", "give one of them"
        )
    return files[0] if files else source


def has_own_formats(source: Path) -> bool:
    """Whether a source may store its weights in few bits already, so that rounding them is asked for and not usual."""
    return is_gguf(source) or holds_graph(source)


def export_model(
    source: Path,
    destination: Path,
    recipe: ExportRecipe,
    progress: Progress = silent,
    command: str = "",
    workbench: Workbench | None = None,
) -> ExportReport:
    """Make a bundle of whatever `source` is; see `upgrade_model` for an ONNX language model, `export_checkpoint` for a
    checkpoint folder or a GGUF file, and `export_by_optimum` for a checkpoint of another family.

    Raises:
        InputError: calibration, a mix, a draft or a report is asked for, and the source is no checkpoint folder that
            is exported directly. And whatever the function for the source raises.
    """
    if not recipe.plain and (holds_graph(source) or goes_by_optimum(source) or is_gguf(source)):
        raise InputError(
            "calibration, mixed weights, drafts and reports are for checkpoints of the families that edge-run builds",
            f"these are {', '.join(supported_families())}",
        )
    if holds_graph(source):
        return upgrade_model(source, destination, recipe, progress, command)
    if goes_by_optimum(source):
        return export_by_optimum(source, destination, recipe, progress, command)
    return export_checkpoint(source, destination, recipe, progress, command, workbench)
