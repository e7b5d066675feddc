"""Budgets as users write them: `3.5bpw`, `300MB`, `300MB@file`, `9ms`, `20ms@4`."""

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
    """Mean bits per weight that a pass reads, or in the file."""
    MEGABYTES = "MB"
    """Megabytes that a pass reads, or in the file."""
    MILLISECONDS = "ms"
    """Time of a pass."""


_PATTERN: Final = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(bpw|mb|ms)(?:@(\d{1,3}|file))?\s*", re.IGNORECASE)
_MEASURES: Final = {measure.value.lower(): measure for measure in Measure}
_HINT: Final = (
    "write 3.5bpw (bits per weight) or 300MB, both as a pass reads them, 3.5bpw@file or 300MB@file, "
    "or 9ms (a pass over one token; 20ms@4 for a pass over four tokens)"
)


@dataclass(frozen=True)
class Budget:
    """An upper limit to the cost of a quantization plan."""

    amount: float
    measure: Measure
    width: int = 1
    """Number of tokens in the pass whose time is limited."""
    in_file: bool = False
    """Whether bytes are those that the linears take in the file, instead of those that a pass reads."""

    def __str__(self) -> str:
        place = "@file" if self.in_file else f"@{self.width}" if self.width != 1 else ""
        return f"{self.amount:g}{self.measure.value}{place}"

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
        place = "@file" if self.in_file else ""
        match self.measure:
            case Measure.BITS:
                return f"{cost * 8 / weight_count(config):.3f}bpw{place}"
            case Measure.MEGABYTES:
                return f"{cost / 1e6:.2f}MB{place}"
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
    amount, measure, place = float(found[1]), _MEASURES[found[2].lower()], (found[3] or "1").lower()
    in_file = place == "file"
    width = 1 if in_file else int(place)
    if not 0 < amount < math.inf or width < 1:
        raise InputError(f"{text!r} is not a budget: it must be positive", _HINT)
    if found[3] is not None and in_file is (measure is Measure.MILLISECONDS):
        wanted = "a size" if in_file else "a time"
        raise InputError(f"{text!r} is not a budget: @{place} goes with {wanted} only", _HINT)
    return Budget(amount, measure, width, in_file)


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
