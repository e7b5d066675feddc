"""What a report says of a model, as values.

Bytes are those that a pass over one token reads, as the processor's kernels want the weights (`allocation.ladder`), not
those of the file. Divergences are means over positions of KL(float32 model || rounded model) in nats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Final

from ...models.manifest import Calibration, WeightFormat
from ...runtime.measure.draft_benefit import DraftBenefit
from ..calibration.divergence import Divergence

GIGA: Final = 1e9
ALIKE: Final = 0.03
"""Plans whose bytes differ by less than this share are taken to be of one size."""


class PlanKind(Enum):
    """How a plan came about."""

    CHOSEN = "chosen"
    """The one the bundle has."""
    UNIFORM = "uniform"
    """One format for all units."""
    NEAREST = "nearest"
    """One format for all units, weights rounded to nearest without any text."""
    RULE = "rule"
    """Formats by a unit's place: more bits for the head and some of the layers."""
    SEARCHED = "searched"
    """Another that the search came by."""


@dataclass(frozen=True)
class LinearFigures:
    """A fused linear in its format."""

    name: str
    """As in `Manifest.weights`."""
    rows: int
    columns: int
    form: WeightFormat
    bytes_read: int
    solo_kl: float | None = None
    """Divergence with this unit alone rounded; None where it was not measured."""
    milliseconds: float | None = None
    """Its part of a pass over one token; None where it was not measured."""

    @property
    def bits_per_weight(self) -> float:
        """Bits read for each weight, scales included."""
        return 8 * self.bytes_read / (self.rows * self.columns)


@dataclass(frozen=True)
class PlanFigures:
    """A whole plan beside others."""

    name: str
    kind: PlanKind
    bytes_read: int
    bits_per_weight: float
    kl: float | None = None
    milliseconds: Mapping[int, float] = field(default_factory=dict)
    """Predicted milliseconds of a pass by its rows."""

    def memory_bound_rate(self, bandwidth: float) -> float:
        """Tokens a second where reading the weights at `bandwidth` GB/s is all that takes time."""
        return bandwidth * GIGA / self.bytes_read


@dataclass(frozen=True)
class Speed:
    """Passes over a few tokens on this machine."""

    predicted: Mapping[int, float]
    """Milliseconds by rows, from the times of units; empty where those were not measured."""
    measured: Mapping[int, float]
    """Milliseconds by rows, of the bundle as written."""

    @property
    def rate(self) -> float | None:
        """Measured tokens a second, one a pass."""
        return 1e3 / self.measured[1] if 1 in self.measured else None

    @property
    def predicted_rate(self) -> float | None:
        """Predicted tokens a second, one a pass."""
        return 1e3 / self.predicted[1] if 1 in self.predicted else None


@dataclass(frozen=True)
class DraftFigures:
    """The draft model in the bundle."""

    made_of: str
    """In words: another checkpoint's name, or which sub-layers of the target it has."""
    acceptance: DraftBenefit
    vocabulary: int | None = None
    """Tokens its head kept; None for all."""
    coverage: float | None = None
    """Share of calibration text that those tokens make up."""


@dataclass(frozen=True)
class SearchStep:
    """The best plan of a search after some generations."""

    generation: int
    kl: float


@dataclass(frozen=True)
class ModelReport:
    """What an export chose, and what that costs."""

    model: str
    command: str
    linears: Sequence[LinearFigures]
    """In the order of the graph; a matrix that two units share is there once."""
    plans: Sequence[PlanFigures]
    """The chosen one and those it is compared with."""
    file_bytes: int
    parity: Mapping[str, float]
    calibration: Calibration | None = None
    quality: Divergence | None = None
    """On text that nothing was chosen by, with weights rounded and activations in float32."""
    shipped: Divergence | None = None
    """The same of the graph as it runs, activations in 8 bits."""
    speed: Speed | None = None
    bandwidths: Sequence[float] = ()
    """GB/s of machines that the report speaks of."""
    drafts: Sequence[DraftFigures] = ()
    budget: str = ""
    search: Sequence[SearchStep] = ()
    seconds: float = 0.0
    """What the export took."""
    machine: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def chosen(self) -> PlanFigures:
        """The bundle's own plan."""
        return next(plan for plan in self.plans if plan.kind is PlanKind.CHOSEN)

    @property
    def compared(self) -> list[PlanFigures]:
        """The plan and what it is chosen instead of, the smallest first."""
        kept = [plan for plan in self.plans if plan.kind in (PlanKind.CHOSEN, PlanKind.UNIFORM, PlanKind.RULE)]
        return sorted(kept, key=lambda plan: (plan.bytes_read, plan.kind is PlanKind.CHOSEN))

    @property
    def against_uniform(self) -> float | None:
        """The chosen plan's KL over that of uniform plans with as many bytes; None without one on either side."""
        expected = log_line(self.chosen.bytes_read, _of_kind(self.plans, PlanKind.UNIFORM))
        return None if expected is None or self.chosen.kl is None else self.chosen.kl / expected

    @property
    def against_nearest(self) -> float | None:
        """The chosen plan's KL over that of rounding to nearest in as many bytes; None where that was not measured."""
        expected = log_line(self.chosen.bytes_read, _of_kind(self.plans, PlanKind.NEAREST))
        return None if expected is None or self.chosen.kl is None else self.chosen.kl / expected

    @property
    def against_rule(self) -> float | None:
        """The chosen plan's KL over that of the best rule-based plan of about as many bytes; None without one."""
        size = self.chosen.bytes_read
        rules = [
            plan.kl
            for plan in self.plans
            if plan.kind is PlanKind.RULE and plan.kl and abs(plan.bytes_read - size) <= ALIKE * size
        ]
        return None if not rules or self.chosen.kl is None else self.chosen.kl / min(rules)


def log_line(bytes_read: float, plans: Sequence[PlanFigures]) -> float | None:
    """KL at that many bytes on the line between the nearest plans on either side, straight in log KL over bytes.

    Plans that another one beats in bytes and KL are left out. None where the plans do not reach so far.
    """
    kept: list[tuple[float, float]] = []
    known = ((float(plan.bytes_read), plan.kl) for plan in plans if plan.kl is not None and plan.kl > 0)
    for size, kl in sorted(known):
        if not kept or kl < kept[-1][1]:
            kept.append((size, kl))
    for (left, left_kl), (right, right_kl) in pairwise(kept):
        if left <= bytes_read <= right:
            share = (bytes_read - left) / (right - left)
            return math.exp((1 - share) * math.log(left_kl) + share * math.log(right_kl))
    return next((kl for size, kl in kept if size == bytes_read), None)


def _of_kind(plans: Sequence[PlanFigures], kind: PlanKind) -> list[PlanFigures]:
    return [plan for plan in plans if plan.kind is kind]
