"""Plots of a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from .axes import Frame, dot, path, text
from .figures import ModelReport, PlanFigures, PlanKind
from .grids import bits_grid, kl_grid

_KINDS: Final[Mapping[PlanKind, str]] = {
    PlanKind.NEAREST: "round-to-nearest",
    PlanKind.UNIFORM: "one format",
    PlanKind.RULE: "by rule",
    PlanKind.SEARCHED: "other plans",
    PlanKind.CHOSEN: "this model",
}
"""Labels of the kinds of plans, in the order of drawing, so that the chosen plan lies on top."""
_LETTER_WIDTH: Final = 5.8
"""Approximate width of a letter of a legend in pixels."""


def plots_of(report: ModelReport) -> dict[str, str]:
    """SVG elements, by a short name, of the plots for which the report has figures."""
    drawn = {
        "bits": bits_grid(report.linears),
        "kl": kl_grid(report.linears),
        "frontier": _plans(
            report.plans, "Size against quality", "MB per token", lambda plan: plan.bytes_read / 1e6, joined=True
        ),
        "latency": _plans(
            report.plans, "Time against quality", "milliseconds per token", lambda plan: plan.milliseconds.get(1)
        ),
        "passes": _passes(report),
        "search": _search(report),
    }
    return {name: plot for name, plot in drawn.items() if plot is not None}


def _plans(
    plans: Sequence[PlanFigures],
    title: str,
    label: str,
    cost_of: Callable[[PlanFigures], float | None],
    *,
    joined: bool = False,
) -> str | None:
    """KL of plans, on a logarithmic scale, over their cost; `joined` connects the uniform plans by a line."""
    known = [(plan, cost, plan.kl) for plan in plans if (cost := cost_of(plan)) is not None and plan.kl and plan.kl > 0]
    if len(known) < 2:
        return None
    frame = Frame(title, label, "mean KL, nats")
    x, y = frame.x_axis([cost for _, cost, _ in known]), frame.y_axis([kl for _, _, kl in known], log=True)
    marks: list[str] = []
    shown = []
    for kind, name in _KINDS.items():
        points = sorted((cost, kl, plan.name) for plan, cost, kl in known if plan.kind is kind)
        if not points:
            continue
        shown.append((kind.value, name))
        if kind in (PlanKind.UNIFORM, PlanKind.NEAREST) and joined:
            marks.append(path([(x.at(cost), y.at(kl)) for cost, kl, _ in points], kind.value))
        for cost, kl, plan_name in points:
            tooltip = f"{plan_name}: {cost:.4g} {label.partition(' ')[0]}, KL {kl:.4g}"
            marks.append(dot(x.at(cost), y.at(kl), 6 if kind is PlanKind.CHOSEN else 4, kind.value, tooltip))
            if kind is PlanKind.UNIFORM:
                marks.append(text(x.at(cost) + 6, y.at(kl) - 6, plan_name.removeprefix("int"), "tick"))
    return frame.svg(x, y, [*marks, *_legend(shown)])


def _legend(entries: Sequence[tuple[str, str]]) -> list[str]:
    """CSS class and label of each series, below the title."""
    parts: list[str] = []
    x = 62.0
    for css_class, label in entries:
        parts += [dot(x, 33, 4, css_class, label), text(x + 8, 37, label, "tick")]
        x += 24 + _LETTER_WIDTH * len(label)
    return parts


def _passes(report: ModelReport) -> str | None:
    """Predicted and measured milliseconds of a pass over its width."""
    speed = report.speed
    if speed is None or len(speed.measured) < 2:
        return None
    frame = Frame("A pass over several tokens", "tokens in a pass", "milliseconds")
    both = {"chosen": ("measured", speed.measured), "uniform": ("predicted", speed.predicted)}
    series = {css_class: (name, sorted(times.items())) for css_class, (name, times) in both.items() if times}
    x = frame.x_axis([float(width) for _, points in series.values() for width, _ in points], zero=True)
    y = frame.y_axis([ms for _, points in series.values() for _, ms in points], zero=True)
    marks: list[str] = []
    for css_class, (name, points) in reversed(series.items()):
        marks.append(path([(x.at(width), y.at(ms)) for width, ms in points], css_class))
        for width, ms in points:
            marks.append(dot(x.at(width), y.at(ms), 4, css_class, f"{name}, {width} tokens: {ms:.4g} ms"))
    return frame.svg(x, y, [*marks, *_legend([(css_class, name) for css_class, (name, _) in series.items()])])


def _search(report: ModelReport) -> str | None:
    """KL of the best plan by generation."""
    steps = [step for step in report.search if step.kl > 0]
    if len(steps) < 2:
        return None
    frame = Frame("The search", "generation", "mean KL of the best plan, nats")
    x = frame.x_axis([step.generation for step in steps])
    y = frame.y_axis([step.kl for step in steps], log=True)
    corners: list[tuple[float, float]] = []
    for step in steps:  # a plan stays the best one until another is found
        if corners:
            corners.append((x.at(step.generation), corners[-1][1]))
        corners.append((x.at(step.generation), y.at(step.kl)))
    return frame.svg(x, y, [path(corners, "chosen")])
