"""Which way of exporting a source takes, by what it is."""

from __future__ import annotations

from pathlib import Path

from .gguf import is_gguf
from .optimum_path import export_by_optimum, goes_by_optimum
from .pipeline import ExportReport, Progress, export_checkpoint, silent
from .recipe import ExportRecipe
from .upgrade import holds_graph, upgrade_model


def has_own_formats(source: Path) -> bool:
    """Whether a source may store its weights in few bits already, so that rounding them is asked for and not usual."""
    return is_gguf(source) or holds_graph(source)


def export_model(
    source: Path,
    destination: Path,
    recipe: ExportRecipe,
    progress: Progress = silent,
    command: str = "",
) -> ExportReport:
    """Make a bundle of whatever `source` is; see `upgrade_model` for an ONNX language model, `export_checkpoint` for a
    checkpoint folder or a GGUF file, and `export_by_optimum` for a checkpoint of another family."""
    if holds_graph(source):
        return upgrade_model(source, destination, recipe, progress, command)
    if goes_by_optimum(source):
        return export_by_optimum(source, destination, recipe, progress, command)
    return export_checkpoint(source, destination, recipe, progress, command)
