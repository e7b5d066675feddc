"""Checkpoint folder or GGUF file in, bundle folder out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..edge.errors import InputError
from .bundle_writer import write_bundle
from .checkpoint import Checkpoint
from .companions import require_companions
from .config import DecoderConfig, read_config
from .content import Content
from .destination import bundle_written_whole, require_apart
from .gguf import is_gguf, opened_gguf
from .layout import expected_tensors
from .parity import Parity
from .progress import Progress, silent
from .recipe import ExportRecipe, with_methods
from .source import ModelSource
from .tokenizer import require_tokenizer


@dataclass(frozen=True)
class ExportReport:
    """What an export made."""

    bundle: Path
    file_bytes: Mapping[str, int]
    """Size by file name, `edge.json` included."""
    bits_per_weight: float
    """Stored bits, scales included, over the weights of all units."""
    seconds: float
    parity: Parity
    notes: tuple[str, ...] = ()
    """What the user did not ask for and should know, a line each."""


def export_checkpoint(
    source: Path,
    destination: Path,
    recipe: ExportRecipe,
    progress: Progress = silent,
    command: str = "",
) -> ExportReport:
    """Export a Hugging Face checkpoint folder or a GGUF file to a bundle and check it against the reference.

    Args:
        source: folder with config.json, safetensors weights and tokenizer.json; or a .gguf file, the first of several
            where the model is split.
        destination: the bundle's folder; an earlier bundle there is replaced at the end, all at once.
        recipe: weight formats and context.
        progress: hears stages "writing weights" and "checking".
        command: what the user typed, for the manifest.

    Raises:
        CheckpointError: the checkpoint is damaged, incomplete or not supported.
        InputError: the destination holds something that is not a bundle's or overlaps the source, the context is
            too long, or a method, zero points or powers of two are asked of a GGUF file.
        DestinationError: the disk refused a write.
        ExportError: the graph does not compute what the checkpoint means. As with every error, the destination is as it
            was before.
    """
    started = time.perf_counter()
    if recipe.method is not None and is_gguf(source):
        raise InputError("the weights of a GGUF file are not rounded by a method of choice", "leave --method out")
    if is_gguf(source):
        recipe.require_usual_scales("GGUF file")
    require_apart(source, destination)
    with opened(source) as (config, checkpoint):
        context = recipe.context_for(config)
        plan = recipe.plan_for(config, checkpoint.own_format)
        if not is_gguf(source):
            plan = with_methods(plan, recipe.method)
        content = Content(checkpoint, checkpoint, config, plan, context, recipe.layout, command)
        with bundle_written_whole(destination) as staging:
            written = write_bundle(staging, content, progress)
            sizes = {file.name: file.stat().st_size for file in sorted(staging.iterdir())}
    seconds = time.perf_counter() - started
    return ExportReport(destination, sizes, written.bits_per_weight, seconds, written.parity)


@contextmanager
def opened(source: Path) -> Iterator[tuple[DecoderConfig, ModelSource]]:
    """A model to export, with everything there that is needed.

    Raises:
        CheckpointError: it is damaged, incomplete or not supported.
    """
    if not is_gguf(source):
        yield _complete(read_config(source), Checkpoint(source))
        return
    with opened_gguf(source) as model:
        yield _complete(read_config(model.folder), model)


def _complete(config: DecoderConfig, checkpoint: ModelSource) -> tuple[DecoderConfig, ModelSource]:
    for name, shape in expected_tensors(config):
        checkpoint.require(name, shape)
    require_tokenizer(checkpoint.folder, config.vocab_size)
    require_companions(checkpoint.folder, config.vocab_size)
    return config, checkpoint
