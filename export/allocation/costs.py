"""What plans cost: bytes, or milliseconds of a pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ...models.manifest import WeightFormat
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layout import FusedLinear
from .format_candidates import bytes_read, chosen_linears


class Costs(Protocol):
    """One measure in which plans cost something, a sum over units."""

    @property
    def fixed(self) -> float:
        """What a pass costs besides its units."""
        ...

    def of(self, linear: FusedLinear, form: WeightFormat) -> float:
        """What a unit costs in that format."""
        ...


class ByteCosts:
    """Bytes as `ladder.bytes_read` counts them."""

    fixed = 0.0

    def of(self, linear: FusedLinear, form: WeightFormat) -> float:
        """Bytes of a unit."""
        return float(bytes_read(linear, form))


def cost_of(plan: Mapping[str, WeightFormat], costs: Costs, config: DecoderConfig) -> float:
    """What a whole plan costs."""
    return costs.fixed + sum(costs.of(linear, plan[linear.name]) for linear in chosen_linears(config))
