"""Checkpoint folder in, bundle folder out."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import onnx

from ..edge.errors import ExportError
from ..models.atomic import folder_written_atomically
from ..models.bundle import COMPANIONS, GRAPH_NAME, WEIGHTS_NAME, digest_file
from ..models.manifest import MANIFEST_NAME, Architecture, FileDigest, Manifest, WeightFormat
from .checkpoint import Checkpoint
from .config import DecoderConfig, read_config
from .graph import build_graph
from .initializers import Initializers
from .recipe import ExportRecipe
from .weightfile import WeightFile


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
    bits_per_weight: float
    seconds: float
    parity: Mapping[str, float]


def export_checkpoint(
    source: Path, destination: Path, recipe: ExportRecipe, progress: Progress = silent
) -> ExportReport:
    started = time.perf_counter()
    config = read_config(source)
    checkpoint = Checkpoint(source)
    context = recipe.context_for(config)
    plan = weight_plan(config, recipe)
    try:
        with folder_written_atomically(destination, lambda folder: (folder / MANIFEST_NAME).is_file()) as staging:
            manifest = _write(config, checkpoint, context, plan, staging, progress)
            (staging / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    except OSError as error:
        raise ExportError(f"{destination} cannot be written: {error}") from error
    return ExportReport(
        destination, {n: d.bytes for n, d in manifest.files.items()}, manifest.bits_per_weight,
        time.perf_counter() - started, manifest.parity
    )


def weight_plan(config: DecoderConfig, recipe: ExportRecipe) -> dict[str, WeightFormat]:
    """Weight format by unit."""
    plan = {"embedding": recipe.head_format}
    for layer in range(config.layers):
        for unit in ("qkv", "o", "gate_up", "down"):
            plan[f"layers.{layer}.{unit}"] = recipe.body
    return plan | {"head": recipe.head_format}


def _write(config, checkpoint, context, plan, folder, progress):
    files = {}
    with WeightFile(folder / WEIGHTS_NAME) as data:
        weights = Initializers(checkpoint, data, WEIGHTS_NAME, lambda n: None)
        model = build_graph(config, context, plan, weights)
        files[WEIGHTS_NAME] = data.digest()
    (folder / GRAPH_NAME).write_bytes(model.SerializeToString())
    files[GRAPH_NAME] = digest_file(folder / GRAPH_NAME)
    for name in COMPANIONS:
        if (checkpoint.folder / name).is_file():
            shutil.copyfile(checkpoint.folder / name, folder / name)
            files[name] = digest_file(folder / name)
    arch = Architecture(config.family, config.vocab_size, config.hidden_size, config.intermediate_size, config.layers,
        config.heads, config.kv_heads, config.head_dim, context, config.tied_head)
    return Manifest(arch, plan, sum(weights.unit_bits.values()) / sum(weights.unit_weights.values()), files, {})
