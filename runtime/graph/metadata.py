"""What lies beside a graph and says something about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...models.bundle import Bundle
from ...models.onnx_file.operators import Operators, operators_of
from .probe import ProbeResult


@dataclass(frozen=True)
class ModelMetadata:
    """Asked where the graph's own ports are silent."""

    first: Path | None = None
    """The graph for passes without cached rows, where that is another one."""
    input_vocab: int | None = None
    """Tokens the embedding has."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """config.json, of the text part where there are several."""
    genai: Mapping[str, Any] = field(default_factory=dict)
    """The `model` section of genai_config.json."""
    operators: Operators | None = None
    """Of the graph; None where it is known to be edge-run's own."""
    reading: ProbeResult | None = None
    """What running the graph showed before."""
    zero_points: bool = False
    """Whether weights of 4 bits have zero points (see `models.zero_point_check`)."""


def metadata_of(bundle: Bundle) -> ModelMetadata:
    """What the files of a model say.

    Raises:
        BundleError: one of them cannot be read.
    """
    if bundle.manifest is not None:
        forms = bundle.manifest.weights.values()
        return ModelMetadata(
            input_vocab=bundle.input_vocab, zero_points=any(form.zero_points and form.bits == 4 for form in forms)
        )
    operators = operators_of(bundle.graph)
    return ModelMetadata(
        bundle.first,
        bundle.input_vocab,
        bundle.config,
        bundle.genai,
        operators,
        zero_points=operators.zero_points,
    )
