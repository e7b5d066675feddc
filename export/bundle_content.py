"""What a bundle is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..models.manifest import GraphLayout, WeightFormat
from .checkpoint.config import DecoderConfig
from .checkpoint.source import ModelSource


@dataclass(frozen=True)
class Model:
    """What is to be exported."""

    source: ModelSource
    """Its tensors, perhaps folded."""
    config: DecoderConfig
    context: int
    """Positions that the graph will serve."""


@dataclass(frozen=True)
class BundleContent:
    """Weights, their formats, and what the manifest says of them."""

    source: ModelSource
    """The weights as they are rounded, perhaps folded."""
    original: ModelSource
    """The weights as the checkpoint has them: what the bundle is compared with."""
    config: DecoderConfig
    plan: Mapping[str, WeightFormat]
    context: int
    layout: GraphLayout
    command: str
    """What the user typed, for the manifest."""
