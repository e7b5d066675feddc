"""Checkpoint folder or GGUF file in, bundle folder out."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from ..edge.errors import InputError
from ..models.bundle import COMPANIONS, GRAPH_NAME, WEIGHTS_NAME, digest_file
from ..models.manifest import MANIFEST_NAME, Architecture, FileDigest, GraphLayout, Manifest, WeightFormat
from ..models.variants import GENAI_CONFIG
from .checkpoint import Checkpoint
from .companions import require_companions
from .config import DecoderConfig, read_config
from .destination import bundle_written_whole, require_apart
from .genai_layout import write_genai_layout
from .gguf import is_gguf, opened_gguf
from .graph import build_graph
from .initializers import Initializers
from .layout import expected_tensors, units_of
from .parity import Parity, check_parity
from .recipe import ExportRecipe, with_methods
from .source import ModelSource
from .tokenizer import require_tokenizer
from .weightfile import WeightFile

PRODUCER: Final = "edge-run"


class Progress(Protocol):
    """Hears how far an export is."""

    def __call__(self, stage: str, fraction: float) -> None:
        """`stage` is a word or two for the user; `fraction` of that stage is done, 0 to 1."""
        ...


def silent(stage: str, fraction: float) -> None:
    """A `Progress` that shows nothing."""


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
            too long, or a method is chosen for a GGUF file.
        DestinationError: the disk refused a write.
        ExportError: the graph does not compute what the checkpoint means. As with every error, the destination is as it
            was before.
    """
    started = time.perf_counter()
    if recipe.method is not None and is_gguf(source):
        raise InputError("the weights of a GGUF file are not rounded by a method of choice", "leave --method out")
    require_apart(source, destination)
    with _opened(source) as (config, checkpoint):
        context = recipe.context_for(config)
        for name, shape in expected_tensors(config):
            checkpoint.require(name, shape)
        require_tokenizer(checkpoint.folder, config.vocab_size)
        require_companions(checkpoint.folder, config.vocab_size)
        plan = recipe.plan_for(config, checkpoint.own_format)
        if not is_gguf(source):
            plan = with_methods(plan, recipe.method)
        parity, bits, sizes = _write_folder(
            destination, checkpoint, config, plan, context, recipe.layout, progress, command
        )
    return ExportReport(destination, sizes, bits, time.perf_counter() - started, parity)


@contextmanager
def _opened(source: Path) -> Iterator[tuple[DecoderConfig, ModelSource]]:
    if not is_gguf(source):
        yield read_config(source), Checkpoint(source)
        return
    with opened_gguf(source) as model:
        yield read_config(model.folder), model


def _write_folder(
    destination: Path,
    checkpoint: ModelSource,
    config: DecoderConfig,
    plan: dict[str, WeightFormat],
    context: int,
    layout: GraphLayout,
    progress: Progress,
    command: str,
) -> tuple[Parity, float, dict[str, int]]:
    """Write the bundle, all at once; returns parity, bits per weight and sizes by file."""
    with bundle_written_whole(destination) as staging:
        parity, bits = _write_bundle(staging, checkpoint, config, plan, context, layout, progress, command)
        sizes = {file.name: file.stat().st_size for file in sorted(staging.iterdir())}
    return parity, bits, sizes


def _write_bundle(
    folder: Path,
    checkpoint: ModelSource,
    config: DecoderConfig,
    plan: dict[str, WeightFormat],
    context: int,
    layout: GraphLayout,
    progress: Progress,
    command: str,
) -> tuple[Parity, float]:
    """Write every file of the bundle; returns parity and bits per weight."""
    total = sum(unit.weight_count for unit in units_of(config) if not (config.tied_head and unit.name == "head"))
    files: dict[str, FileDigest] = {}
    with WeightFile(folder / WEIGHTS_NAME) as data:
        weights = Initializers(checkpoint, data, _fraction_of(total, progress))
        graph = build_graph(config, context, plan, weights)
        files[WEIGHTS_NAME] = data.digest()
    (folder / GRAPH_NAME).write_bytes(graph.SerializeToString())
    for name in COMPANIONS:
        if (checkpoint.folder / name).is_file():
            shutil.copyfile(checkpoint.folder / name, folder / name)
    parity = check_parity(folder, checkpoint, config, plan, context, lambda fraction: progress("checking", fraction))
    if layout is GraphLayout.GENAI:
        write_genai_layout(folder, config, context)
    progress("checking", 1.0)
    names = (GRAPH_NAME, GENAI_CONFIG, *COMPANIONS)
    files |= {name: digest_file(folder / name) for name in names if (folder / name).is_file()}
    bits = sum(weights.unit_bits.values()) / total
    manifest = Manifest(
        architecture=_architecture(config, context),
        weights=plan,
        bits_per_weight=bits,
        files=files,
        parity=parity.as_mapping(),
        producer=PRODUCER,
        command=command,
        layout=layout,
    )
    (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return parity, bits


def _fraction_of(total: int, progress: Progress) -> Callable[[int], None]:
    """Turns counts of weights just written into calls of `progress`."""
    written = 0

    def stored(count: int) -> None:
        nonlocal written
        written += count
        progress("writing weights", written / total)

    return stored


def _architecture(config: DecoderConfig, context: int) -> Architecture:
    return Architecture(
        family=config.family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        context=context,
        tied_head=config.tied_head,
    )
