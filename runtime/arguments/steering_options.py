"""Options of what steers an answer: adapters and control vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .argument_types import OptionRecord, option

_MOST_STRENGTH: Final = 1000.0
"""Largest factor: much larger ones only overflow, which would look like damaged weights."""


@dataclass(frozen=True)
class SteeringOptions(OptionRecord):
    """What a model that was loaded with adapters or control vectors answers with."""

    adapter: str | None = option(
        None, "Name of a LoRA adapter that the model was loaded with.", metavar="NAME", unset="the model itself"
    )
    control: str | None = option(
        None, "Name of a control vector that the model was loaded with.", metavar="NAME", unset="none"
    )
    control_strength: float = option(
        1.0,
        "Factor on the control vector; below 0, it steers the other way.",
        accepts=lambda strength: abs(strength) <= _MOST_STRENGTH,
        range=f"between -{_MOST_STRENGTH:g} and {_MOST_STRENGTH:g}",
        metavar="X",
    )
