"""What the files beside a graph say about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...models.bundle import Bundle
from ...models.onnx_file.wire import Operators, operators_of
from .probe import ProbeResult


@dataclass(frozen=True)
class ModelMetadata:
    """Metadata used where the graph's own inputs and outputs leave something open."""

    first_pass_graph: Path | None = None
    """The graph for passes without cached tokens, if that is a separate one."""
    input_vocab: int | None = None
    """Number of token embeddings."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """config.json; only its text section if there are several."""
    genai: Mapping[str, Any] = field(default_factory=dict)
    """The `model` section of genai_config.json."""
    operators: Operators | None = None
    """Operators of the graph; None for graphs that edge-run exported."""
    draft_head: bool = False
    """Whether the graph is a draft head, which is of no use without its target."""
    probe_result: ProbeResult | None = None
    """Result of an earlier probe of the graph."""


def metadata_of(bundle: Bundle) -> ModelMetadata:
    """Collect the metadata of a model from its files.

    Raises:
        BundleError: one of them cannot be read.
    """
    if bundle.manifest is not None:
        return ModelMetadata(input_vocab=bundle.input_vocab)
    operators = operators_of(bundle.graph)
    if bundle.embedding is not None:
        operators |= operators_of(bundle.embedding)
    return ModelMetadata(bundle.first, bundle.input_vocab, bundle.config, bundle.genai, operators)
