"""The model to export, and the content of the bundle made of it."""

from __future__ import annotations

from dataclasses import dataclass

from ..models.manifest import GraphLayout
from .checkpoint.config import DecoderConfig
from .checkpoint.layer_weights import QuantPlan
from .checkpoint.source import ModelSource
from .graph.inputs_outputs import DraftFeatures
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
class BundleContent:
    """Weights, their formats, and what the manifest says about them."""

    source: ModelSource
    """The weights to quantize, AWQ scaling applied where the recipe has it."""
    original: ModelSource
    """The weights of the checkpoint, with which the bundle is compared."""
    config: DecoderConfig
    plan: QuantPlan
    context: int
    """Number of positions that the graph serves."""
    layout: GraphLayout = GraphLayout.EDGE
    command: str = ""
    """The command line, recorded in the manifest."""
    hidden_states: bool = False
    """Whether the graph gives the states before its LM head, for embeddings."""
    static_shapes: tuple[StaticShape, ...] = ()
    """Sizes of the static graphs for NPUs to write beside it."""
    features: DraftFeatures | None = None
    """The hidden states that the graph gives for a draft head; None for none."""
