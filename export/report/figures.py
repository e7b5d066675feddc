"""Figures of a report about an exported model, as plain values.

Bytes are those that a pass over one token reads, as the processor's kernels store weights (`allocation.plan_costs`),
not bytes of the file. Divergences are means over positions of KL(float32 model || quantized model) in nats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Final

from ...models.manifest import Calibration, WeightFormat
from ...runtime.measure.draft_benefit import DraftBenefit
from ..allocation.choices import Sensitivity
from ..allocation.format_candidates import planned_linears
from ..allocation.linear_times import LinearTimes
from ..allocation.plan_costs import bytes_read, plan_cost, weight_count
from ..calibration.divergence import Divergence
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import QuantPlan
from .text_tasks import TaskFigures

SIZE_TOLERANCE: Final = 0.03
"""Plans whose bytes differ by less than this share count as equally large."""
WIDTHS: Final = (1, 4)
"""Widths of the passes whose time is predicted: plain decoding, and a few draft tokens."""


class PlanKind(Enum):
    """Origin of a plan."""

    CHOSEN = "chosen"
    """The plan of the bundle."""
    UNIFORM = "uniform"
    """One format for all linears."""
    NEAREST = "nearest"
    """One format for all linears, by round-to-nearest without any text."""
    RULE = "rule"
    """Formats by a linear's place: more bits for the head and some of the layers."""
    SEARCHED = "searched"
    """Another plan that the search found."""


@dataclass(frozen=True)
class LinearFigures:
    """Figures of a fused linear in its format."""

    name: str
    """Name as in `Manifest.weights`."""
    rows: int
    """Number of outputs."""
    columns: int
    """Number of inputs."""
    weight_format: WeightFormat
    bytes_read: int
    kl_alone: float | None = None
    """Mean KL with only this linear quantized; None where it was not measured."""
    milliseconds: float | None = None
    """Time in a pass over one token; None where it was not measured."""

    @property
    def bits_per_weight(self) -> float:
        """Bits read per weight, scales included."""
        return 8 * self.bytes_read / (self.rows * self.columns)


@dataclass(frozen=True)
class PlanFigures:
    """Figures of a quantization plan."""

    name: str
    kind: PlanKind
    bytes_read: int
    bits_per_weight: float
    kl: float
    """Mean KL from the float model, in nats."""
    milliseconds: Mapping[int, float]
    """Predicted milliseconds of a pass by its width."""


@dataclass(frozen=True)
class Speed:
    """Times of passes over a few tokens on this machine."""

    predicted: Mapping[int, float]
    """Milliseconds by the width of the pass, from the times of linears; empty where those were not measured."""
    measured: Mapping[int, float]
    """Milliseconds by the width of the pass, of the bundle as written."""

    @property
    def rate(self) -> float:
        """Measured tokens per second of plain decoding."""
        return 1e3 / self.measured[1]


@dataclass(frozen=True)
class DraftFigures:
    """Figures of the draft model in the bundle."""

    made_of: str
    """Name of its checkpoint."""
    benefit: DraftBenefit
    vocabulary_size: int | None = None
    """Number of tokens that its head kept; None for all."""
    coverage: float | None = None
    """Share of the tokens of held-out answers that the head has."""


@dataclass(frozen=True)
class ModelReport:
    """What an export chose, and what was measured of it."""

    model: str
    command: str
    linears: Sequence[LinearFigures]
    """Linears in the order of the graph; a matrix that two linears share occurs once."""
    plans: Sequence[PlanFigures]
    """The chosen plan and those it is compared with."""
    file_bytes: int
    """Bytes of the files of the model."""
    parity: Mapping[str, float]
    bits_per_weight_in_file: float
    """Bits of all linears in the file, divided by the number of their weights; plans count what a pass reads."""
    calibration: Calibration
    quality: Divergence
    """Quality on held-out text with quantized weights and float32 activations."""
    shipped: Divergence
    """Quality on held-out text of the graph as it runs, with 8-bit activations."""
    tasks: Sequence[TaskFigures]
    """Answers to questions about the user's text; none where none was given."""
    speed: Speed
    bandwidths: Sequence[float]
    """Memory bandwidths in GB/s for which speeds are predicted."""
    drafts: Sequence[DraftFigures]
    budget: str
    seconds: float
    """Duration of the export."""
    machine: Mapping[str, str]
    notes: Sequence[str]

    @property
    def chosen(self) -> PlanFigures:
        """The plan of the bundle."""
        return next(plan for plan in self.plans if plan.kind is PlanKind.CHOSEN)

    @property
    def compared(self) -> list[PlanFigures]:
        """The chosen plan and its alternatives, in ascending size."""
        kept = [plan for plan in self.plans if plan.kind in (PlanKind.CHOSEN, PlanKind.UNIFORM, PlanKind.RULE)]
        return sorted(kept, key=lambda plan: (plan.bytes_read, plan.kind is PlanKind.CHOSEN))

    def against(self, kind: PlanKind) -> float | None:
        """KL of the chosen plan relative to plans of a kind that read as many bytes; None without such plans.

        It is compared with the best rule-based plan of about as many bytes, and with other plans by `log_line`.
        """
        size, plans = self.chosen.bytes_read, [plan for plan in self.plans if plan.kind is kind]
        if kind is PlanKind.RULE:
            near = (plan.kl for plan in plans if abs(plan.bytes_read - size) <= SIZE_TOLERANCE * size)
            expected = min(filter(None, near), default=None)
        else:
            expected = log_line(size, plans)
        return None if expected is None else self.chosen.kl / expected


def log_line(bytes_read: float, plans: Sequence[PlanFigures]) -> float | None:
    """KL at a number of bytes, interpolated between the nearest plans, linear in log KL over bytes.

    Plans that another one beats in bytes and KL are left out. None outside the range of the plans.
    """
    kept: list[tuple[float, float]] = []
    for size, kl in sorted((float(plan.bytes_read), plan.kl) for plan in plans if plan.kl > 0):
        if not kept or kl < kept[-1][1]:
            kept.append((size, kl))
    for (left, left_kl), (right, right_kl) in pairwise(kept):
        if left <= bytes_read <= right:
            share = (bytes_read - left) / (right - left)
            return math.exp((1 - share) * math.log(left_kl) + share * math.log(right_kl))
    return next((kl for size, kl in kept if size == bytes_read), None)


def linear_figures(
    config: DecoderConfig,
    plan: QuantPlan,
    sensitivities: Mapping[str, Sequence[Sensitivity]] | None = None,
    times: LinearTimes | None = None,
) -> list[LinearFigures]:
    """Figures of every linear that has a format of its own, in the order of the graph.

    Args:
        config: The model's numbers.
        plan: Format of each linear, by its name.
        sensitivities: Sensitivities of linears, by their names; None where they were not measured.
        times: Times of passes on this machine; None where they were not measured.
    """
    found = []
    for linear in planned_linears(config):
        weight_format, milliseconds = plan[linear.name], None
        # Formats compare equal whatever their method.
        wanted, measured = (weight_format, weight_format.method), (sensitivities or {}).get(linear.name, ())
        known = (each.divergence for each in measured if (each.weight_format, each.weight_format.method) == wanted)
        if times is not None:
            with suppress(KeyError):  # a format that was not timed
                milliseconds = times.linear(linear, weight_format, 1)
        size = bytes_read(linear, weight_format)
        shape = linear.shape[0], linear.columns
        found.append(LinearFigures(linear.name, *shape, weight_format, size, next(known, None), milliseconds))
    return found


def plan_figures(
    config: DecoderConfig, plan: QuantPlan, name: str, kind: PlanKind, kl: float, times: LinearTimes | None = None
) -> PlanFigures:
    """Figures of a plan; arguments as for `linear_figures`."""
    milliseconds: dict[int, float] = {}
    if times is not None:
        with suppress(KeyError):  # a format that was not timed
            milliseconds = {width: plan_cost(plan, times.costs(width), config) for width in WIDTHS}
    size = sum(bytes_read(linear, plan[linear.name]) for linear in planned_linears(config))
    return PlanFigures(name, kind, size, 8 * size / weight_count(config), kl, milliseconds)
