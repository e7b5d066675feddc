"""Sensitivities: the mean KL of one linear quantized alone, for every format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ...models.atomic import write_atomically
from ...models.json_file import is_finite, parse_json_object
from ...models.manifest import WeightFormat
from ...models.progress import Progress, silent
from ...models.regular_file import MAX_JSON_BYTES, read_regular
from ..checkpoint.layer_weights import FusedLinear
from .format_candidates import is_allowed
from .plan_file import spelled

STAGE: Final = "measuring sensitivities"


class Sensitivity(NamedTuple):
    """KL of one linear quantized alone, in one format."""

    weight_format: WeightFormat
    divergence: float
    """Mean KL in nats with every other linear in float32."""


def measure_sensitivities(
    linears: Sequence[FusedLinear],
    formats: Sequence[WeightFormat],
    divergence_alone: Callable[[str, WeightFormat], float],
    file: Path,
    progress: Progress = silent,
) -> dict[str, tuple[Sensitivity, ...]]:
    """Measure every linear in every format that it may take; what the file holds is not measured again.

    Args:
        linears: Linears to measure.
        formats: Formats to measure each in.
        divergence_alone: Measures the mean KL in nats with only the named linear quantized.
        file: Keeps every value as soon as it is known; a file of this model, text and set of methods alone.
        progress: Receives the stage "measuring sensitivities".

    Returns:
        The sensitivities of each linear, by its name.

    Raises:
        OSError: The disk refused a write.
    """
    known = _stored(file)
    allowed = {linear.name: [each for each in formats if is_allowed(linear, each)] for linear in linears}
    total = sum(map(len, allowed.values()))
    done = 0

    def measured(linear: str, weight_format: WeightFormat) -> Sensitivity:
        nonlocal done
        key = f"{linear} {spelled(weight_format)}"
        if key not in known:
            known[key] = divergence_alone(linear, weight_format)
            write_atomically(file, json.dumps(known, indent=0).encode())
        done += 1
        progress(STAGE, done / total)
        return Sensitivity(weight_format, known[key])

    return {linear: tuple(measured(linear, each) for each in its_formats) for linear, its_formats in allowed.items()}


def _stored(file: Path) -> dict[str, float]:
    """Values of an earlier run; none where the file is missing or damaged."""
    try:
        values: Mapping[str, object] = parse_json_object(read_regular(file, MAX_JSON_BYTES))
    except (OSError, ValueError):
        return {}
    return {key: float(value) for key, value in values.items() if isinstance(value, (int, float)) and is_finite(value)}
