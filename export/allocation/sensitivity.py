"""How much each unit suffers from each format, by itself: the mean KL with all else in float."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ...models.atomic import write_atomically
from ...models.json_file import is_finite, parse_json_object
from ...models.manifest import WeightFormat
from ...models.progress import Progress, silent
from ..checkpoint.layout import FusedLinear
from .format_candidates import may_have
from .plan_file import spelled

STAGE: Final = "measuring units"


class Solo(NamedTuple):
    """What a format does to a unit by itself."""

    form: WeightFormat
    divergence: float
    """Mean KL in nats with all else in float."""


def solo_divergences(
    linears: Sequence[FusedLinear],
    forms: Sequence[WeightFormat],
    solo: Callable[[str, WeightFormat], float],
    file: Path,
    progress: Progress = silent,
) -> dict[str, tuple[Solo, ...]]:
    """Mean KL by unit, for every format; what the file knows is not measured again.

    Args:
        units: to be measured.
        forms: to be tried on each that may have them.
        solo: the measurement, mean KL in nats with only that unit rounded.
        file: keeps every value as soon as it is known; of this model, this text and these methods alone.
        progress: hears stage "measuring units".

    Raises:
        OSError: the disk refused a write.
    """
    known = _read(file)
    tried = {linear.name: [form for form in forms if may_have(linear, form)] for linear in linears}
    total = sum(map(len, tried.values()))
    done = 0

    def measured(linear: str, form: WeightFormat) -> Solo:
        nonlocal done
        key = f"{linear} {spelled(form)}"
        if key not in known:
            known[key] = solo(linear, form)
            write_atomically(file, json.dumps(known, indent=0).encode())
        done += 1
        progress(STAGE, done / total)
        return Solo(form, known[key])

    return {linear: tuple(measured(linear, form) for form in of_unit) for linear, of_unit in tried.items()}


def _read(file: Path) -> dict[str, float]:
    """What an earlier run has measured; nothing where its file is damaged."""
    try:
        values: Mapping[str, object] = parse_json_object(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return {key: float(value) for key, value in values.items() if isinstance(value, (int, float)) and is_finite(value)}
