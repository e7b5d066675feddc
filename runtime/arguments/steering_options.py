"""Options of what steers an answer: adapters and control vectors."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .argument_types import OptionRecord, option


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
        accepts=math.isfinite,
        range="a finite number",
        metavar="X",
    )
