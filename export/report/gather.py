"""A report's figures, from what an export found out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ...models.manifest import WeightFormat
from ..allocation.costs import cost_of
from ..allocation.format_candidates import bytes_read, chosen_units, weight_count
from ..allocation.linear_times import UnitTimes
from ..allocation.sensitivity import Solo
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layout import Unit
from .figures import PlanFigures, PlanKind, SearchStep, UnitFigures

ROWS: Final = (1, 4)
"""Tokens of the passes whose time the report predicts: plain decoding, and a few guesses."""


def unit_figures(
    config: DecoderConfig,
    plan: Mapping[str, WeightFormat],
    solos: Mapping[str, Sequence[Solo]] | None = None,
    times: UnitTimes | None = None,
) -> list[UnitFigures]:
    """Figures of every unit that has a format of its own, in the order of the graph.

    Args:
        config: the model's numbers.
        plan: format by unit.
        solos: what each format does to each unit by itself; None where it was not measured.
        times: of passes on this machine; None where they were not measured.
    """
    return [
        UnitFigures(
            name=unit.name,
            rows=unit.shape[0],
            columns=unit.columns,
            form=plan[unit.name],
            bytes_read=bytes_read(unit, plan[unit.name]),
            solo_kl=_alone(plan[unit.name], () if solos is None else solos.get(unit.name, ())),
            milliseconds=None if times is None else _milliseconds(times, unit, plan[unit.name]),
        )
        for unit in chosen_units(config)
    ]


def plan_figures(
    config: DecoderConfig,
    plan: Mapping[str, WeightFormat],
    name: str,
    kind: PlanKind,
    kl: float | None = None,
    times: UnitTimes | None = None,
    speculative_rate: float | None = None,
) -> PlanFigures:
    """Figures of a whole plan; arguments as for `unit_figures`."""
    size = sum(bytes_read(unit, plan[unit.name]) for unit in chosen_units(config))
    return PlanFigures(
        name=name,
        kind=kind,
        bytes_read=size,
        bits_per_weight=8 * size / weight_count(config),
        kl=kl,
        milliseconds={} if times is None else _passes(times, config, plan),
        speculative_rate=speculative_rate,
    )


def search_steps(history: Iterable[tuple[int, float]]) -> list[SearchStep]:
    """A search's history of generations and best KL."""
    return [SearchStep(generation, kl) for generation, kl in history]


def _alone(form: WeightFormat, solos: Sequence[Solo]) -> float | None:
    """KL of a unit in a format, rounded by that format's method; None where it was not measured."""
    known = (solo.divergence for solo in solos if (solo.form, solo.form.method) == (form, form.method))
    return next(known, None)


def _milliseconds(times: UnitTimes, unit: Unit, form: WeightFormat) -> float | None:
    """A unit's part of a pass over one token; None in a format that was not timed."""
    try:
        return times.unit(unit, form, 1)
    except KeyError:
        return None


def _passes(
    times: UnitTimes, config: DecoderConfig, plan: Mapping[str, WeightFormat], rows: Sequence[int] = ROWS
) -> dict[int, float]:
    """Milliseconds by rows; none where a format was not timed."""
    try:
        return {count: cost_of(plan, times.costs(count), config) for count in rows}
    except KeyError:
        return {}
