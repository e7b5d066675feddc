"""Checkpoint folder or GGUF file in, bundle folder out."""

from __future__ import annotations

import time
from pathlib import Path

from ..errors import InputError
from .bundle_content import BundleContent
from .bundle_writer import write_bundle
from .calibration.prepare import prepare, settings_of
from .calibration.work_folder import work_folder
from .checkpoint.open import opened
from .completion import complete
from .destination import bundle_written_whole, require_apart
from .drafts.draft_making import require_draft
from .gguf import is_gguf
from .outcome import ExportReport
from .progress import Progress, silent
from .recipe import ExportRecipe, with_methods
from .workbench import Workbench


def export_checkpoint(
    source: Path,
    destination: Path,
    recipe: ExportRecipe,
    progress: Progress = silent,
    command: str = "",
    workbench: Workbench | None = None,
) -> ExportReport:
    """Export a Hugging Face checkpoint folder or a GGUF file to a bundle and check it against the reference.

    Args:
        source: folder with config.json, safetensors weights and tokenizer.json; or a .gguf file, the first of several
            where the model is split.
        destination: the bundle's folder; an earlier bundle there is replaced at the end, all at once.
        recipe: weight formats and context, and what else is asked for.
        progress: hears stages such as "writing weights" and "checking".
        command: what the user typed, for the manifest.
        workbench: runs models; needed unless the recipe is `plain`.

    Raises:
        CheckpointError: the checkpoint is damaged, incomplete or not supported.
        InputError: the destination holds something that is not a bundle's or overlaps the source, the context is
            too long, a method is chosen for a GGUF file, a text, budget or plan does not do (see `prepare`), or the
            draft has other tokens.
        DestinationError: the disk refused a write.
        ExportError: the graph does not compute what the checkpoint means. As with every error, the destination is as it
            was before.
        ValueError: there is no workbench, and one is needed.
    """
    started = time.perf_counter()
    if recipe.method is not None and is_gguf(source):
        raise InputError("the weights of a GGUF file are not rounded by a method of choice", "leave --method out")
    if is_gguf(source):
        recipe.require_usual_scales("GGUF file")
    require_apart(source, destination)
    with opened(source) as (config, checkpoint):
        context = recipe.context_for(config)
        if recipe.draft is not None:
            require_draft(checkpoint.folder, recipe.draft)
        if recipe.plain:
            plan = recipe.plan_for(config, checkpoint.own_format)
            if not is_gguf(source):
                plan = with_methods(plan, recipe.methods)
            content = BundleContent(checkpoint, checkpoint, config, plan, context, recipe.layout, command)
            with bundle_written_whole(destination) as staging:
                written = write_bundle(staging, content, progress)
                sizes, found = sizes_of(staging), None
        else:
            if workbench is None:
                raise ValueError("an export by text needs a workbench")
            with work_folder(source, settings_of(recipe, context), recipe.work) as folder:
                prepared = prepare(checkpoint, config, context, recipe, command, folder, workbench, progress)
                with bundle_written_whole(destination) as staging:
                    written = write_bundle(staging, prepared.content, progress)
                    found = complete(
                        staging, source.resolve().name, prepared, written, recipe, workbench, progress, started
                    )
                    sizes = sizes_of(staging)
    seconds = time.perf_counter() - started
    return ExportReport(destination, sizes, written.bits_per_weight, seconds, written.parity, report=found)


def sizes_of(folder: Path) -> dict[str, int]:
    """Bytes by file, those of folders in it included."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}
