"""Budgets as users write them: `3.5bpw`, `300MB`, `9ms`, `20ms@4`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from ...errors import InputError
from ..checkpoint.config import DecoderConfig
from .plan_costs import weight_count


class Measure(StrEnum):
    """What a budget limits; each value is the suffix that users write."""

    BITS = "bpw"
    """Mean bits per weight that a pass reads."""
    MEGABYTES = "MB"
    """Megabytes that a pass reads."""
    MILLISECONDS = "ms"
    """Time of a pass."""


_PATTERN: Final = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(bpw|mb|ms)(?:@(\d{1,3}))?\s*", re.IGNORECASE)
_MEASURES: Final = {measure.value.lower(): measure for measure in Measure}
_HINT: Final = (
    "write 3.5bpw (bits per weight), 300MB, or 9ms (a pass over one token; 20ms@4 for a pass over four tokens)"
)


@dataclass(frozen=True)
class Budget:
    """An upper limit to the cost of a quantization plan."""

    amount: float
    measure: Measure
    width: int = 1
    """Number of tokens in the pass whose time is limited."""

    def __str__(self) -> str:
        return f"{self.amount:g}{self.measure.value}" + (f"@{self.width}" if self.width != 1 else "")

    def limit(self, config: DecoderConfig) -> float:
        """The limit for a model, in bytes or milliseconds."""
        match self.measure:
            case Measure.BITS:
                return self.amount * weight_count(config) / 8
            case Measure.MEGABYTES:
                return self.amount * 1e6
            case Measure.MILLISECONDS:
                return self.amount

    def spelled(self, cost: float, config: DecoderConfig) -> str:
        """Write a cost, in bytes or milliseconds, as a budget of this measure."""
        match self.measure:
            case Measure.BITS:
                return f"{cost * 8 / weight_count(config):.3f}bpw"
            case Measure.MEGABYTES:
                return f"{cost / 1e6:.2f}MB"
            case Measure.MILLISECONDS:
                return f"{cost:.2f}ms"


def parse_budget(text: str) -> Budget:
    """Parse a budget that a user typed.

    Raises:
        InputError: The text is not a budget.
    """
    found = _PATTERN.fullmatch(text)
    if found is None:
        raise InputError(f"{text!r} is not a budget", _HINT)
    amount, measure, width = float(found[1]), _MEASURES[found[2].lower()], int(found[3] or 1)
    if not 0 < amount < math.inf or width < 1:
        raise InputError(f"{text!r} is not a budget: it must be positive", _HINT)
    if found[3] is not None and measure is not Measure.MILLISECONDS:
        raise InputError(f"{text!r} is not a budget: @{width} goes with a time only", _HINT)
    return Budget(amount, measure, width)


def require_reachable(budget: Budget, config: DecoderConfig, cheapest: float, dearest: float) -> None:
    """Check that some plan is within a budget.

    Args:
        budget: The budget that the user gave.
        config: The model's numbers.
        cheapest: Cost of the cheapest plan, in the unit of `Budget.limit`.
        dearest: Cost of the dearest plan.

    Raises:
        InputError: Even the cheapest plan exceeds the budget.
    """
    if budget.limit(config) < cheapest:
        raise InputError(
            f"no quantization plan of this model is within {budget}",
            f"give a budget from {budget.spelled(cheapest, config)} to {budget.spelled(dearest, config)}",
        )
