"""Writes a report as `report.html`, a self-contained page with plots and grids, and as `report.json`.

The template draws the plots as SVG elements with CSS classes. Coordinates are SVG pixels, x to the right and y
downwards. See docs/decisions/0020-plots-drawn-here.md.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, NamedTuple

from jinja2 import Environment, StrictUndefined

from ...models.atomic import write_atomically
from ...models.bundle import REPORT_DATA_NAME, REPORT_PAGE_NAME
from ...models.manifest import WeightFormat
from .figures import LinearFigures, ModelReport, PlanFigures, PlanKind
from .tables import headlines, tables_of

_TEMPLATE: Final = Path(__file__).parent / "report.html.jinja"
_DIGITS: Final = 6
_KINDS: Final[Mapping[PlanKind, str]] = {
    PlanKind.NEAREST: "round-to-nearest",
    PlanKind.UNIFORM: "one format",
    PlanKind.RULE: "by rule",
    PlanKind.SEARCHED: "other plans",
    PlanKind.CHOSEN: "this model",
}
"""Labels of the kinds of plans, in the order of drawing, so that the chosen plan lies on top."""
_TICK_STEPS: Final = (1.0, 2.0, 2.5, 5.0, 10.0)
_LOG_TICKS: Final = (1.0, 2.0, 5.0)
_MARGIN: Final = 0.06
"""Margin at both ends of an axis, as a share of its length."""
_WIDTH, _HEIGHT = 540, 350
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, _WIDTH - 14, 52, _HEIGHT - 42
"""Size of a plot in pixels, and the bounds of the area between its axes."""
_IN_LAYER: Final = re.compile(r"layers\.(\d+)\.(.+)")
_FAINTEST: Final = 0.08
_STRONG_SHADE: Final = 0.6
"""Shade from which on text is dark on any page."""


def write_report(folder: Path, report: ModelReport) -> None:
    """Write both files into a bundle's folder.

    Raises:
        OSError: The disk refused a write.
    """
    data = json.dumps(as_values(report), indent=2, ensure_ascii=False) + "\n"
    write_atomically(folder / REPORT_DATA_NAME, data.encode())
    write_atomically(folder / REPORT_PAGE_NAME, page(report).encode())


def page(report: ModelReport) -> str:
    """Render the HTML page."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=False)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        report=report,
        headlines=headlines(report),
        tables=tables_of(report),
        grids=grids_of(report.linears),
        plots=plots_of(report),
        area=(_LEFT, _RIGHT, _TOP, _BOTTOM, _WIDTH, _HEIGHT),
        short_number=short_number,
    )


def as_values(report: ModelReport) -> dict[str, Any]:
    """The report as plain values, for JSON."""
    compared = (PlanKind.UNIFORM, PlanKind.NEAREST, PlanKind.RULE)
    relative = {f"kl_against_{kind.value}": _plain(report.against(kind)) for kind in compared}
    return {**_fields(report), "bits_per_weight_read": _plain(report.chosen.bits_per_weight), **relative}


def _plain(value: Any) -> Any:
    if isinstance(value, WeightFormat):
        return {"format": str(value), **{name: each for name, each in _fields(value).items() if each}}
    if is_dataclass(value):
        return _fields(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}


class Mark(NamedTuple):
    """A drawn element of a plot; coordinates are pixels."""

    element: str
    """`polyline` through all points, `circle` with a tooltip, or `text`."""
    css_class: str
    points: list[tuple[float, float]]
    content: str = ""
    """The text or the tooltip."""
    radius: float = 4


class Plot(NamedTuple):
    """A plot with its axes; the template adds ticks, labels and the legend."""

    title: str
    x_label: str
    y_label: str
    x: Axis
    y: Axis
    marks: list[Mark]
    legend: Sequence[tuple[str, str]] = ()
    """CSS class and label of each series."""


def plots_of(report: ModelReport) -> list[Plot]:
    """The plots for which the report has figures."""
    drawn = (
        _plans(report.plans, "Size against quality", "MB per token", lambda plan: plan.bytes_read / 1e6, joined=True),
        _plans(report.plans, "Time against quality", "milliseconds per token", lambda plan: plan.milliseconds.get(1)),
    )
    return [plot for plot in drawn if plot is not None]


def _plans(
    plans: Sequence[PlanFigures],
    title: str,
    label: str,
    cost_of: Callable[[PlanFigures], float | None],
    *,
    joined: bool = False,
) -> Plot | None:
    """KL of plans, on a logarithmic scale, over their cost; `joined` connects the uniform plans by a line."""
    known = [(plan, cost, plan.kl) for plan in plans if (cost := cost_of(plan)) is not None and plan.kl > 0]
    if len(known) < 2:
        return None
    x = axis_for([cost for _, cost, _ in known], _LEFT, _RIGHT)
    y = axis_for([kl for _, _, kl in known], _BOTTOM, _TOP, log=True)
    marks: list[Mark] = []
    shown = []
    for kind, name in _KINDS.items():
        points = sorted((cost, kl, plan.name) for plan, cost, kl in known if plan.kind is kind)
        if not points:
            continue
        shown.append((kind.value, name))
        if kind in (PlanKind.UNIFORM, PlanKind.NEAREST) and joined:
            marks.append(Mark("polyline", kind.value, [(x.at(cost), y.at(kl)) for cost, kl, _ in points]))
        for cost, kl, plan_name in points:
            tooltip, place = f"{plan_name}: {cost:.4g} {label.partition(' ')[0]}, KL {kl:.4g}", (x.at(cost), y.at(kl))
            marks.append(Mark("circle", kind.value, [place], tooltip, 6 if kind is PlanKind.CHOSEN else 4))
            if kind is PlanKind.UNIFORM:
                marks.append(Mark("text", "tick", [(place[0] + 6, place[1] - 6)], plan_name.removeprefix("int")))
    return Plot(title, label, "mean KL, nats", x, y, marks, shown)


@dataclass(frozen=True)
class Axis:
    """A scale from values to pixels, from `low` at `start` to `high` at `end`; `start` may be larger than `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Pixel of a value."""
        low, high = self._scaled(self.low), self._scaled(self.high)
        share = (self._scaled(value) - low) / (high - low)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 6) -> list[float]:
        """About `count` round values within the scale."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            parts = (1.0,) if len(decades) > count else _LOG_TICKS
            every = math.ceil(len(decades) / (2 * count))
            found = self._within(part * 10.0**decade for decade in decades[::every] for part in parts)
            if len(found) > 1:
                return found
        raw = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(part * power for part in _TICK_STEPS if part * power >= raw * (1 - 1e-9))
        return self._within(step * at for at in range(math.floor(self.low / step), math.ceil(self.high / step) + 1))

    def _within(self, values: Iterable[float]) -> list[float]:
        return [value for value in values if self.low <= value <= self.high]

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.log else value


def axis_for(values: Sequence[float], start: float, end: float, *, log: bool = False) -> Axis:
    """An axis for all values, which a logarithmic one requires to be positive."""
    low, high = min(values), max(values)
    if log:
        low, high = math.log10(low), math.log10(high)
    spread = high - low or abs(high) * 0.5 or 1.0
    low, high = low - _MARGIN * spread, high + _MARGIN * spread
    if log:
        return Axis(10.0**low, 10.0**high, start, end, log=True)
    return Axis(low, high, start, end)


def short_number(value: float) -> str:
    """A number in few characters."""
    return f"{value:.10g}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.0e}".replace("e-0", "e-")


class Cell(NamedTuple):
    """The cell of a linear."""

    text: str
    detail: str
    """Smaller text behind it."""
    css_class: str
    shade: float = 1.0
    tooltip: str = ""


class Grid(NamedTuple):
    """A row of cells for each kind of linear; one that no layer has takes its whole row."""

    title: str
    layers: int
    rows: dict[str, list[Cell | None]]


def grids_of(linears: Sequence[LinearFigures]) -> list[Grid]:
    """Bits and block size of each linear, and the KL of the model with it alone quantized: the darker, the more."""
    logs = [math.log10(linear.kl_alone) for linear in linears if linear.kl_alone]

    def bits(linear: LinearFigures) -> Cell:
        weight_format = linear.weight_format
        css_class = f"bits{next((bits for bits in (2, 4, 8) if weight_format.bits <= bits), 32)}"
        return Cell(str(weight_format.bits), f"/{weight_format.block}" if weight_format.block else "", css_class)

    def kl(linear: LinearFigures) -> Cell:
        number = "-" if linear.kl_alone is None else f"{linear.kl_alone:.0e}".replace("e-0", "e-")
        if not linear.kl_alone:
            return Cell(number, "", "cost", 0.0)
        share = (math.log10(linear.kl_alone) - min(logs)) / ((max(logs) - min(logs)) or 1)
        shade = _FAINTEST + (1 - _FAINTEST) * share
        return Cell(number, "", "cost strong" if shade > _STRONG_SHADE else "cost", shade)

    places = {linear.name: _IN_LAYER.fullmatch(linear.name) for linear in linears}
    layers = max((1 + int(place[1]) for place in places.values() if place), default=0)
    titles = {"Bits and block size of each linear": bits, "KL with each linear alone quantized, nats": kl}
    grids = [Grid(title, layers, {}) for title, cell_of in titles.items() if layers and (logs or cell_of is bits)]
    for grid in grids:
        for linear in linears:
            tooltip = f"{linear.name}: {linear.weight_format}, {linear.bytes_read / 1e6:.4g} MB"
            if linear.kl_alone is not None:
                tooltip += f", KL alone {linear.kl_alone:.3g}"
            cell, place = titles[grid.title](linear)._replace(tooltip=tooltip), places[linear.name]
            if place is None:
                grid.rows[linear.name] = [cell]
            else:
                grid.rows.setdefault(place[2], [None] * layers)[int(place[1])] = cell
    return grids
