"""Gathers the figures of a report from the results of an export."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ...models.manifest import WeightFormat
from ..allocation.format_candidates import planned_linears
from ..allocation.linear_times import LinearTimes
from ..allocation.plan_costs import bytes_read, plan_cost, weight_count
from ..allocation.sensitivity import Sensitivity
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import FusedLinear, QuantPlan
from .figures import LinearFigures, PlanFigures, PlanKind, SearchStep

WIDTHS: Final = (1, 4)
"""Widths of the passes whose time is predicted: plain decoding, and a few draft tokens."""


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
    return [
        LinearFigures(
            name=linear.name,
            rows=linear.shape[0],
            columns=linear.columns,
            weight_format=plan[linear.name],
            bytes_read=bytes_read(linear, plan[linear.name]),
            kl_alone=_kl_alone(plan[linear.name], (sensitivities or {}).get(linear.name, ())),
            milliseconds=None if times is None else _milliseconds(times, linear, plan[linear.name]),
        )
        for linear in planned_linears(config)
    ]


def plan_figures(
    config: DecoderConfig,
    plan: QuantPlan,
    name: str,
    kind: PlanKind,
    kl: float | None = None,
    times: LinearTimes | None = None,
) -> PlanFigures:
    """Figures of a plan; arguments as for `linear_figures`."""
    size = sum(bytes_read(linear, plan[linear.name]) for linear in planned_linears(config))
    return PlanFigures(
        name=name,
        kind=kind,
        bytes_read=size,
        bits_per_weight=8 * size / weight_count(config),
        kl=kl,
        milliseconds={} if times is None else _pass_times(times, config, plan),
    )


def search_steps(history: Iterable[tuple[int, float]]) -> list[SearchStep]:
    """Steps of a search from its history of generations and best KL."""
    return [SearchStep(generation, kl) for generation, kl in history]


def _kl_alone(weight_format: WeightFormat, sensitivities: Sequence[Sensitivity]) -> float | None:
    """KL of a linear alone in a format and by its method; None where it was not measured."""
    wanted = weight_format, weight_format.method
    known = (each.divergence for each in sensitivities if (each.weight_format, each.weight_format.method) == wanted)
    return next(known, None)


def _milliseconds(times: LinearTimes, linear: FusedLinear, weight_format: WeightFormat) -> float | None:
    """Time of a linear in a pass over one token; None in a format that was not timed."""
    try:
        return times.linear(linear, weight_format, 1)
    except KeyError:
        return None


def _pass_times(times: LinearTimes, config: DecoderConfig, plan: QuantPlan) -> dict[int, float]:
    """Milliseconds of passes by their width; empty where a format was not timed."""
    try:
        return {width: plan_cost(plan, times.costs(width), config) for width in WIDTHS}
    except KeyError:
        return {}
