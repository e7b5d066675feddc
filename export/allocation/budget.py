"""Budgets as people write them: `3.5bpw`, `300MB`, `9ms`, `20ms@4`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

from ...errors import InputError
from ..checkpoint.config import DecoderConfig
from .format_candidates import weight_count


class Measure(str, Enum):
    """What a budget limits; the values are how it is written."""

    BITS = "bpw"
    """Bits of a weight, on average, as a pass reads them."""
    MEGABYTES = "MB"
    """Bytes that a pass reads, in millions."""
    MILLISECONDS = "ms"
    """Time of a pass."""


_WRITTEN: Final = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(bpw|mb|ms)(?:@(\d{1,3}))?\s*", re.IGNORECASE)
_MEASURES: Final = {measure.value.lower(): measure for measure in Measure}
_HINT: Final = "write it like 3.5bpw (bits a weight), 300MB, or 9ms (a pass of one row; 20ms@4: of four rows)"


@dataclass(frozen=True)
class Budget:
    """A limit to what a plan may cost."""

    amount: float
    measure: Measure
    rows: int = 1
    """Of the pass whose time is limited."""

    def __str__(self) -> str:
        return f"{self.amount:g}{self.measure.value}" + (f"@{self.rows}" if self.rows != 1 else "")

    def limit(self, config: DecoderConfig) -> float:
        """The limit in the unit of its costs: bytes of that model, or milliseconds."""
        match self.measure:
            case Measure.BITS:
                return self.amount * weight_count(config) / 8
            case Measure.MEGABYTES:
                return self.amount * 1e6
            case Measure.MILLISECONDS:
                return self.amount

    def shown(self, cost: float, config: DecoderConfig) -> str:
        """A cost in this budget's measure, as it would be written."""
        match self.measure:
            case Measure.BITS:
                return f"{cost * 8 / weight_count(config):.3f}bpw"
            case Measure.MEGABYTES:
                return f"{cost / 1e6:.2f}MB"
            case Measure.MILLISECONDS:
                return f"{cost:.2f}ms"


def parse_budget(text: str) -> Budget:
    """A budget from what a user typed.

    Raises:
        InputError: it is none.
    """
    found = _WRITTEN.fullmatch(text)
    if found is None:
        raise InputError(f"{text!r} is no budget", _HINT)
    amount, measure, rows = float(found[1]), _MEASURES[found[2].lower()], int(found[3] or 1)
    if not 0 < amount < math.inf or rows < 1:
        raise InputError(f"{text!r} is no budget: it must be more than nothing", _HINT)
    if found[3] is not None and measure is not Measure.MILLISECONDS:
        raise InputError(f"{text!r} is no budget: only a time is that of some rows", _HINT)
    return Budget(amount, measure, rows)


def require_reachable(budget: Budget, config: DecoderConfig, least: float, most: float) -> None:
    """Check that a plan within the budget exists.

    Args:
        budget: what was asked for.
        config: the model's numbers.
        least: what the cheapest plan costs, in the unit of `Budget.limit`.
        most: what the best one costs.

    Raises:
        InputError: there is none.
    """
    if budget.limit(config) < least:
        raise InputError(
            f"no plan of this model keeps to {budget}",
            f"budgets from {budget.shown(least, config)} to {budget.shown(most, config)} make a difference",
        )
