"""The model to export, the content of the bundle made of it, and its manifest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..models.bundle import digest_file
from ..models.manifest import MANIFEST_NAME, GraphLayout, Manifest, WeightFormat
from .checkpoint.config import DecoderConfig
from .checkpoint.layer_weights import QuantPlan
from .checkpoint.source import ModelSource
from .graph.inputs_outputs import DraftFeatures
from .npu.npu_weights import IntegerLinears
from .npu.static_shapes import StaticShape


@dataclass(frozen=True)
class SourceModel:
    """The model to export."""

    source: ModelSource
    """Its tensors, AWQ scaling applied where the recipe has it."""
    config: DecoderConfig
    context: int
    """Number of positions that the graph will serve."""


@dataclass(frozen=True, kw_only=True)
class BundleContent(SourceModel):
    """The model as a bundle holds it: formats of its weights, and what the manifest says about them."""

    original: ModelSource
    """The weights of the checkpoint, with which the bundle is compared."""
    plan: QuantPlan
    layout: GraphLayout = GraphLayout.EDGE
    command: str = ""
    """The command line, recorded in the manifest."""
    hidden_states: bool = False
    """Whether the graph gives the states before its LM head, for embeddings."""
    static_shapes: tuple[StaticShape, ...] = ()
    """Sizes of the static graphs for NPUs to write beside it."""
    integer_linears: IntegerLinears | None = None
    """How these graphs compute linears in integers; None for float16."""
    vision: WeightFormat | None = None
    """Format of the weights of the vision tower; None to leave the tower out."""
    features: DraftFeatures | None = None
    """The hidden states that the graph gives for a draft head; None for none."""


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a bundle.

    Raises:
        BundleError: it is damaged.
        OSError: it cannot be read.
    """
    path = folder / MANIFEST_NAME
    return Manifest.from_json(path.read_bytes(), str(path))


def write_manifest(folder: Path, manifest: Manifest, files: Iterable[str]) -> Manifest:
    """Write a manifest, with the digests of those of `files` that the bundle has; returns what was written."""
    digests = {name: digest_file(folder / name) for name in files if (folder / name).is_file()}
    manifest = replace(manifest, files={**manifest.files, **digests})
    (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def change_manifest(folder: Path, files: Iterable[str] = (), **changes: Any) -> None:
    """Change fields of a bundle's manifest, and record `files`, which were written or changed."""
    write_manifest(folder, replace(read_manifest(folder), **changes), files)
