"""The report of a measurement: an HTML page, or its plots as a PNG, drawn with matplotlib (the `bench` extra).

Every plot is drawn in the colours of a light page. In SVG these become CSS variables, so that one picture serves a
light and a dark page.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from jinja2 import Environment, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ...models.atomic import write_atomically
from .bench_result import BenchResult
from .clients import COLUMNS, ClientsResult
from .ratios import RoundTimes
from .table import acceptance_text, interval_text

LIGHT: Final = ("#1d2330", "#c3c9d4", "#1f6feb", "#d9730d", "#0f8a6a", "#a13fc0", "#b38600", "#6b7280")
"""Colours of a light page: ink, faint lines, then the modes in order; further modes share the last one."""
DARK: Final = ("#e4e8f0", "#454c5c", "#6ea8ff", "#ffa657", "#4fd1ab", "#d79bf0", "#e3c14f", "#a0a8b8")
"""Colours of a dark page in the same order."""
_INK, _FAINT, *_SERIES = LIGHT
_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 11.0,
    "legend.frameon": False,
    "grid.color": _FAINT,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK),
}
_WIDTH, _HEIGHT = 6.4, 3.3
"""Inches of a plot; those with bars have other heights."""

Draw = Callable[[Axes, Any], None]
_TEMPLATE: Final = Path(__file__).parent / "report.html.jinja"


def png(result: BenchResult | ClientsResult) -> bytes:
    """All plots on one sheet, as a PNG file."""
    plots = list(_plots(result).values())
    with mpl.rc_context(_STYLE):
        rows = [max(height for _, height in plots[i : i + 2]) for i in range(0, len(plots), 2)]
        figure = Figure(figsize=(2 * _WIDTH, sum(rows) + 0.6), layout="constrained", facecolor="white")
        conditions = result.conditions
        title = f"{conditions.model}: {conditions.source}{' (replay)' if conditions.replay else ''}"
        figure.suptitle(title, color=_INK)
        grid = figure.add_gridspec(len(rows), 2, height_ratios=rows)
        for number, (draw, _) in enumerate(plots):
            draw(figure.add_subplot(grid[number // 2, number % 2]), result)
        target = BytesIO()
        figure.savefig(target, format="png", dpi=150)
    return target.getvalue()


def _plots(result: BenchResult | ClientsResult) -> dict[str, tuple[Draw, float]]:
    """The functions that draw the plots of a result, and their heights in inches, by name."""
    if isinstance(result, ClientsResult):
        return {"clients_rate": (_clients_rate, _HEIGHT), "clients_times": (_clients_times, _HEIGHT)}
    bars = len(result.modes)
    plots: dict[str, tuple[Draw, float]] = {
        "speedup": (_speedup, 1.25 + (0.16 + 0.2 * bars) * (len(result.modes[0].categories) + 1))
    }
    if len(result.pass_cost_ms) > 1:
        plots["pass_cost"] = (_pass_cost, _HEIGHT)
    if any(mode.stats.by_depth for mode in result.modes):
        plots["depth"] = (_depth, _HEIGHT)
    return {**plots, "round": (_round, 1.35 + 0.32 * (bars + 1))}


def _svg(name: str, draw: Draw, height: float, result: BenchResult) -> str:
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        draw(figure.add_subplot(), result)
        target = StringIO()
        figure.savefig(target, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = target.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(id="|url\(#|xlink:href="#)', rf"\g<1>{name}-", text)  # several plots share one page
    for number, colour in enumerate(LIGHT):
        text = text.replace(colour, f"var(--plot-{number})")
    return text


def _colour(number: int) -> str:
    return _SERIES[min(number, len(_SERIES) - 1)]


def _legend(axes: Axes) -> None:
    """Put the legend between title and plot, in one line."""
    handles, _ = axes.get_legend_handles_labels()
    axes.set_title(axes.get_title(loc="left"), pad=24)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=max(1, len(handles)),
        borderaxespad=0.1,
        handlelength=1.2,
        columnspacing=1.2,
        fontsize=8.5,
    )


def _speedup(axes: Axes, result: BenchResult) -> None:
    """Draw bars by category, the mean first, with whiskers for the confidence interval."""
    modes = result.modes
    labels = ["geometric mean", *(each.name for each in modes[0].categories)]
    height = 0.8 / len(modes)
    furthest = 1.0
    for number, mode in enumerate(modes):
        estimates = [mode.mean, *(each.ratio for each in mode.categories)]
        values = np.array([each.value for each in estimates])
        edges = np.array([each.interval or (each.value, each.value) for each in estimates])
        whiskers = np.abs(edges - values[:, None]).T
        places = np.arange(len(labels)) + (number - (len(modes) - 1) / 2) * height
        axes.barh(places, values, height * 0.9, color=_colour(number), label=mode.name)
        axes.errorbar(values, places, xerr=whiskers, fmt="none", ecolor=_INK, elinewidth=0.9, capsize=2)
        furthest = max(furthest, float(edges.max()), float(values.max()))
        for place, value, edge in zip(places, values, edges.max(axis=1), strict=True):
            at = (max(edge, value), place)
            axes.annotate(f"{value:.2f}", at, (4, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.axvline(1.0, color=_INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.set(xlim=(0, furthest * 1.12), xlabel="speed relative to plain decoding", title="Speed-up by category")
    axes.set_yticks(range(len(labels)), labels)
    axes.get_yticklabels()[0].set_fontweight("bold")
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.grid(axis="x", linewidth=0.6)
    if len(modes) > 1:
        _legend(axes)


def _pass_cost(axes: Axes, result: BenchResult) -> None:
    """Draw the cost of a pass over m tokens beside the cost of m passes over one token."""
    ms = np.array(result.pass_cost_ms)
    widths = np.arange(1, len(ms) + 1)
    axes.plot(widths, ms, color=_colour(0), marker="o", markersize=4, label="one pass over m")
    axes.plot(widths, ms[0] * widths, color=_INK, linewidth=1, linestyle=(0, (4, 3)), label="m passes over one")
    axes.set(xlim=(0.5, len(ms) + 0.5), ylim=(0, float(ms.max()) * 1.15))
    axes.set_xticks(widths if len(widths) <= 16 else widths[::4])
    axes.grid(linewidth=0.6)
    title = f"Pass cost t(m) at a context of {result.pass_cost_context} tokens"
    axes.set(xlabel="m, tokens of a pass", ylabel="milliseconds", title=title)
    _legend(axes)


def _depth(axes: Axes, result: BenchResult) -> None:
    """Draw the acceptance rate of the draft tokens at each depth."""
    for number, mode in enumerate(result.modes):
        counts = mode.stats.by_depth
        if not counts:
            continue
        depths = np.arange(1, len(counts) + 1)
        rates = [100 * each.acceptance_rate if each.drafted else np.nan for each in counts]
        largest = max(each.drafted for each in counts)
        sizes = [10 + 90 * each.drafted / largest for each in counts]
        colour = _colour(number)
        axes.plot(depths, rates, color=colour, linewidth=1.4, label=mode.name)
        axes.scatter(depths, rates, sizes, color=colour, zorder=3)
    axes.set_xlim(left=0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(linewidth=0.6)
    axes.set(ylim=(0, 105), ylabel="accepted, %", title="Acceptance rate by depth")
    axes.set_xlabel("depth in the draft, tokens (larger dots: more draft tokens)")
    if len(result.modes) > 1:
        _legend(axes)


def _round(axes: Axes, result: BenchResult) -> None:
    """Draw where the milliseconds of a token go, in other colours than those of the first modes."""
    labels = list(result.stats)
    tokens = np.array([stats.tokens_per_pass for stats in result.stats.values()])
    rounds = [RoundTimes.of(stats) for stats in result.stats.values()]
    left = np.zeros(len(labels))
    for number, (name, part) in enumerate((("target pass", "target"), ("draft passes", "draft"), ("host", "host"))):
        widths = np.array([getattr(times, part) for times in rounds]) / tokens
        if widths.any():
            axes.barh(labels, widths, 0.62, left, color=_SERIES[3 + number], label=name)
        left += widths
    for place, total in enumerate(left):
        axes.annotate(f"{total:.2f}", (float(total), place), (4, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()
    axes.set(xlim=(0, float(left.max()) * 1.15), xlabel="milliseconds per token", title="Where the time goes")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", linewidth=0.6)
    _legend(axes)


def _clients_rate(axes: Axes, result: ClientsResult) -> None:
    """Draw the rate of all clients together, beside one client's rate times their number."""
    counts, rates = ([row[name] for row in result.rows] for name in ("clients", "tokens_per_second"))
    axes.plot(counts, rates, color=_colour(0), marker="o", markersize=4, label="all clients together")
    most = [rates[0] * count for count in counts]
    axes.plot(counts, most, color=_INK, linewidth=1, linestyle=(0, (4, 3)), label="one client, times clients")
    axes.set(
        xticks=counts, ylim=(0, max(rates) * 1.3), xlabel="clients", ylabel="tokens per second", title="Throughput"
    )
    axes.grid(linewidth=0.6)
    _legend(axes)


def _clients_times(axes: Axes, result: ClientsResult) -> None:
    """Draw the times of a request: medians with solid lines, 95th percentiles with dashed ones."""
    counts = [row["clients"] for row in result.rows]
    for number, name in enumerate(COLUMNS[2:]):
        line, label = ("--" if number % 2 else "-"), name.removesuffix("_ms").replace("_", " ")
        values = [row[name] for row in result.rows]
        axes.plot(counts, values, line, color=_colour(number // 2), marker="o", markersize=4, label=label)
    axes.set(xticks=counts, yscale="log", xlabel="clients", ylabel="milliseconds", title="Times of a request")
    axes.grid(linewidth=0.6)
    _legend(axes)


def write_report(path: Path, result: BenchResult | ClientsResult) -> None:
    """Write a PNG if the name ends in .png or the result is one of clients, else an HTML page.

    The file appears whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    if isinstance(result, ClientsResult) or path.suffix.lower() == ".png":
        write_atomically(path, png(result))
    else:
        write_atomically(path, page(result).encode())


def page(result: BenchResult) -> str:
    """The HTML page."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=False)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        conditions=result.conditions,
        modes=result.modes,
        plain=result.plain,
        stats=result.stats,
        rounds={name: RoundTimes.of(stats) for name, stats in result.stats.items()},
        plots={name: _svg(name, *plot, result) for name, plot in _plots(result).items()},
        light=LIGHT,
        dark=DARK,
        facts=_facts(result),
        notes=result.notes,
        reasons={mode.name: result.reason_without_ratio(mode) for mode in result.modes},
        acceptance_text=acceptance_text,
        interval_text=interval_text,
    )


def _facts(result: BenchResult) -> dict[str, Any]:
    conditions = result.conditions
    return {
        "prompts": f"{conditions.conversations} conversations of {conditions.source}, turns: {conditions.turns}",
        "maximum tokens of an answer": min(conditions.max_tokens, conditions.context),
        "temperature": "0 (greedy)" if conditions.temperature == 0 else conditions.temperature,
        "context": conditions.context,
        "device": conditions.device,
        "threads": conditions.threads or "-",
        **result.machine,
    }
