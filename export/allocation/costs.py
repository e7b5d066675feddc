"""What plans cost: bytes, or milliseconds of a pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ...models.manifest import WeightFormat
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layout import Unit
from .format_candidates import bytes_read, chosen_units


class Costs(Protocol):
    """One measure in which plans cost something, a sum over units."""

    @property
    def fixed(self) -> float:
        """What a pass costs besides its units."""
        ...

    def of(self, unit: Unit, form: WeightFormat) -> float:
        """What a unit costs in that format."""
        ...


class ByteCosts:
    """Bytes as `ladder.bytes_read` counts them."""

    fixed = 0.0

    def of(self, unit: Unit, form: WeightFormat) -> float:
        """Bytes of a unit."""
        return float(bytes_read(unit, form))


def cost_of(plan: Mapping[str, WeightFormat], costs: Costs, config: DecoderConfig) -> float:
    """What a whole plan costs."""
    return costs.fixed + sum(costs.of(unit, plan[unit.name]) for unit in chosen_units(config))
