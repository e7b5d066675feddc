"""A report's figures, from what an export found out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ...models.manifest import WeightFormat
from ..allocation.costs import cost_of
from ..allocation.format_candidates import bytes_read, chosen_linears, weight_count
from ..allocation.linear_times import LinearTimes
from ..allocation.sensitivity import Solo
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layout import FusedLinear
from .figures import LinearFigures, PlanFigures, PlanKind, SearchStep

ROWS: Final = (1, 4)
"""Tokens of the passes whose time the report predicts: plain decoding, and a few guesses."""


def linear_figures(
    config: DecoderConfig,
    plan: Mapping[str, WeightFormat],
    solos: Mapping[str, Sequence[Solo]] | None = None,
    times: LinearTimes | None = None,
) -> list[LinearFigures]:
    """Figures of every unit that has a format of its own, in the order of the graph.

    Args:
        config: the model's numbers.
        plan: format by unit.
        solos: what each format does to each unit by itself; None where it was not measured.
        times: of passes on this machine; None where they were not measured.
    """
    return [
        LinearFigures(
            name=linear.name,
            rows=linear.shape[0],
            columns=linear.columns,
            form=plan[linear.name],
            bytes_read=bytes_read(linear, plan[linear.name]),
            solo_kl=_alone(plan[linear.name], () if solos is None else solos.get(linear.name, ())),
            milliseconds=None if times is None else _milliseconds(times, linear, plan[linear.name]),
        )
        for linear in chosen_linears(config)
    ]


def plan_figures(
    config: DecoderConfig,
    plan: Mapping[str, WeightFormat],
    name: str,
    kind: PlanKind,
    kl: float | None = None,
    times: LinearTimes | None = None,
) -> PlanFigures:
    """Figures of a whole plan; arguments as for `linear_figures`."""
    size = sum(bytes_read(linear, plan[linear.name]) for linear in chosen_linears(config))
    return PlanFigures(
        name=name,
        kind=kind,
        bytes_read=size,
        bits_per_weight=8 * size / weight_count(config),
        kl=kl,
        milliseconds={} if times is None else _passes(times, config, plan),
    )


def search_steps(history: Iterable[tuple[int, float]]) -> list[SearchStep]:
    """A search's history of generations and best KL."""
    return [SearchStep(generation, kl) for generation, kl in history]


def _alone(form: WeightFormat, solos: Sequence[Solo]) -> float | None:
    """KL of a unit in a format, rounded by that format's method; None where it was not measured."""
    known = (solo.divergence for solo in solos if (solo.form, solo.form.method) == (form, form.method))
    return next(known, None)


def _milliseconds(times: LinearTimes, linear: FusedLinear, form: WeightFormat) -> float | None:
    """A unit's part of a pass over one token; None in a format that was not timed."""
    try:
        return times.linear(linear, form, 1)
    except KeyError:
        return None


def _passes(
    times: LinearTimes, config: DecoderConfig, plan: Mapping[str, WeightFormat], rows: Sequence[int] = ROWS
) -> dict[int, float]:
    """Milliseconds by rows; none where a format was not timed."""
    try:
        return {count: cost_of(plan, times.costs(count), config) for count in rows}
    except KeyError:
        return {}
