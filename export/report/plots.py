"""The report's plots: what plans cost and lose, which unit got what, how a search went, what passes take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from .axes import Frame, dot, path, text
from .figures import ModelReport, PlanFigures, PlanKind
from .grids import bits_grid, kl_alone_grid

_KINDS: Final[Mapping[PlanKind, str]] = {
    PlanKind.NEAREST: "rounded to nearest",
    PlanKind.UNIFORM: "one format",
    PlanKind.RULE: "by rule",
    PlanKind.SEARCHED: "other mixes",
    PlanKind.CHOSEN: "this model",
}
"""In the order of drawing, so that the chosen plan lies on top."""
_LETTER: Final = 5.8
"""Pixels of a letter, about."""
_CELL_HEIGHT: Final = 30
_WIDEST_CELL: Final = 62


def plots_of(report: ModelReport) -> dict[str, str]:
    """An SVG element for each plot the report has data for, by a short name."""
    drawn = {
        "bits": bits_grid(report.linears),
        "kl": kl_alone_grid(report.linears),
        "frontier": _plans(
            report.plans, "Size against quality", "MB read for a token", lambda plan: plan.bytes_read / 1e6, joined=True
        ),
        "latency": _plans(
            report.plans, "Time against quality", "milliseconds of a token", lambda plan: plan.milliseconds.get(1)
        ),
        "passes": _passes(report),
        "search": _search(report),
    }
    return {name: plot for name, plot in drawn.items() if plot is not None}


def _plans(
    plans: Sequence[PlanFigures],
    title: str,
    label: str,
    cost: Callable[[PlanFigures], float | None],
    *,
    joined: bool = False,
) -> str | None:
    """KL, in a logarithmic scale, over what plans cost; `joined` draws a line through the uniform ones."""
    known = [(plan, price, plan.kl) for plan in plans if (price := cost(plan)) is not None and plan.kl and plan.kl > 0]
    if len(known) < 2:
        return None
    frame = Frame(title, label, "mean KL, nats")
    x, y = frame.x_axis([price for _, price, _ in known]), frame.y_axis([kl for _, _, kl in known], log=True)
    marks: list[str] = []
    shown = []
    for kind, name in _KINDS.items():
        points = sorted((price, kl, plan.name) for plan, price, kl in known if plan.kind is kind)
        if not points:
            continue
        shown.append((kind.value, name))
        if kind in (PlanKind.UNIFORM, PlanKind.NEAREST) and joined:
            marks.append(path([(x.at(price), y.at(kl)) for price, kl, _ in points], kind.value))
        for price, kl, plan_name in points:
            hint = f"{plan_name}: {price:.4g} {label.partition(' ')[0]}, KL {kl:.4g}"
            marks.append(dot(x.at(price), y.at(kl), 6 if kind is PlanKind.CHOSEN else 4, kind.value, hint))
            if kind is PlanKind.UNIFORM:
                marks.append(text(x.at(price) + 6, y.at(kl) - 6, plan_name.removeprefix("int"), "tick"))
    return frame.drawn(x, y, [*marks, *_legend(shown)])


def _legend(entries: Sequence[tuple[str, str]]) -> list[str]:
    """Kind and words of each series, below the title."""
    parts: list[str] = []
    at = 62.0
    for kind, words in entries:
        parts += [dot(at, 33, 4, kind, words), text(at + 8, 37, words, "tick")]
        at += 24 + _LETTER * len(words)
    return parts


def _passes(report: ModelReport) -> str | None:
    """Milliseconds of a pass over its rows, as predicted and as measured."""
    speed = report.speed
    if speed is None or len(speed.measured) < 2:
        return None
    frame = Frame("A pass over several tokens", "tokens in a pass", "milliseconds")
    both = {"chosen": ("measured", speed.measured), "uniform": ("predicted", speed.predicted)}
    series = {kind: (name, sorted(times.items())) for kind, (name, times) in both.items() if times}
    x = frame.x_axis([float(rows) for _, points in series.values() for rows, _ in points], zero=True)
    y = frame.y_axis([ms for _, points in series.values() for _, ms in points], zero=True)
    marks: list[str] = []
    for kind, (name, points) in reversed(series.items()):
        marks.append(path([(x.at(rows), y.at(ms)) for rows, ms in points], kind))
        marks += [dot(x.at(rows), y.at(ms), 4, kind, f"{name}, {rows} tokens: {ms:.4g} ms") for rows, ms in points]
    return frame.drawn(x, y, [*marks, *_legend([(kind, name) for kind, (name, _) in series.items()])])


def _search(report: ModelReport) -> str | None:
    """The best plan's KL by generation."""
    steps = [step for step in report.search if step.kl > 0]
    if len(steps) < 2:
        return None
    frame = Frame("The search", "generations", "mean KL of the best plan, nats")
    x = frame.x_axis([step.generation for step in steps])
    y = frame.y_axis([step.kl for step in steps], log=True)
    corners: list[tuple[float, float]] = []
    for step in steps:  # a plan stays the best one until another is found
        if corners:
            corners.append((x.at(step.generation), corners[-1][1]))
        corners.append((x.at(step.generation), y.at(step.kl)))
    return frame.drawn(x, y, [path(corners, "chosen")])
