"""The report's plots, by matplotlib (the `bench` extra).

Every plot is drawn once with placeholder colours. In SVG these become CSS variables, so that one picture serves a light
and a dark page; in PNG they are drawn as the light page has them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from io import BytesIO, StringIO
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .bench_result import Result
from .ratios import PLAIN

INK: Final = "#010101"
FAINT: Final = "#020202"
SERIES: Final = ("#010110", "#010111", "#010112", "#010113", "#010114", "#010115")
"""Contenders, in their order; more than these share the last."""
LIGHT: Final = {
    INK: "#1d2330",
    FAINT: "#c3c9d4",
    **dict(zip(SERIES, ("#1f6feb", "#d9730d", "#0f8a6a", "#a13fc0", "#b38600", "#6b7280"), strict=True)),
}
"""What a light page shows for each placeholder."""
DARK: Final = {
    INK: "#e4e8f0",
    FAINT: "#454c5c",
    **dict(zip(SERIES, ("#6ea8ff", "#ffa657", "#4fd1ab", "#d79bf0", "#e3c14f", "#a0a8b8"), strict=True)),
}
"""What a dark page shows."""
_STYLE: Final = {
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
}
_WIDTH: Final = 6.4
_PARTS: Final = SERIES[3:]
"""Parts of a round have other colours than contenders."""

Palette = dict[str, str]
Draw = Callable[[Axes, Result, Palette], None]


def variable(placeholder: str) -> str:
    """The name of the CSS variable that stands for a placeholder."""
    return f"--plot-{placeholder[1:]}"


def svg_plots(result: Result) -> dict[str, str]:
    """An SVG element for each plot the result has data for, by a short name."""
    return {name: _svg(name, draw, result) for name, draw in _drawn(result).items()}


def png(result: Result) -> bytes:
    """All plots on one sheet."""
    drawn = _drawn(result)
    palette = LIGHT
    with mpl.rc_context(_style(palette)):
        heights = [_height(name, result) for name in drawn]
        rows = [max(heights[i : i + 2]) for i in range(0, len(heights), 2)]
        figure = Figure(figsize=(2 * _WIDTH, sum(rows) + 0.6), layout="constrained", facecolor="white")
        mode = result.conditions
        figure.suptitle(f"{mode.model}: {mode.source}" + (" (replay)" if mode.replay else ""), color=palette[INK])
        grid = figure.add_gridspec(len(rows), 2, height_ratios=rows)
        for number, draw in enumerate(drawn.values()):
            draw(figure.add_subplot(grid[number // 2, number % 2]), result, palette)
        target = BytesIO()
        figure.savefig(target, format="png", dpi=150)
    return target.getvalue()


def _drawn(result: Result) -> dict[str, Draw]:
    drawn: dict[str, Draw] = {"speedup": _speedup}
    if len(result.step_cost_ms) > 1:
        drawn["step_cost"] = _step_cost
    if any(account.run.by_depth for account in result.accounts):
        drawn["depth"] = _depth
    drawn["round"] = _round
    return drawn


def _height(name: str, result: Result) -> float:
    """Inches."""
    bars = len(result.accounts)
    if name == "speedup":
        return 1.25 + (0.16 + 0.2 * bars) * (len(result.accounts[0].categories) + 1)
    return 1.35 + 0.32 * (bars + 1) if name == "round" else 3.3


def _style(palette: Palette) -> dict[Any, Any]:
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    return {**_STYLE, **dict.fromkeys(names, palette[INK]), "grid.color": palette[FAINT]}


def _svg(name: str, draw: Draw, result: Result) -> str:
    palette = {placeholder: placeholder for placeholder in LIGHT}
    with mpl.rc_context({**_style(palette), "svg.hashsalt": name}):
        figure = Figure(figsize=(_WIDTH, _height(name, result)), layout="constrained")
        draw(figure.add_subplot(), result, palette)
        target = StringIO()
        figure.savefig(target, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = target.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(id="|url\(#|xlink:href="#)', rf"\g<1>{name}-", text)  # several plots share one page
    for placeholder in palette:
        text = text.replace(placeholder, f"var({variable(placeholder)})")
    return text


def _colour(number: int, palette: Palette) -> str:
    return palette[SERIES[min(number, len(SERIES) - 1)]]


def _legend(axes: Axes) -> None:
    """Below the title, however many entries there are."""
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


def _speedup(axes: Axes, result: Result, palette: Palette) -> None:
    """Bars by category, the mean first, with whiskers for the interval."""
    accounts = result.accounts
    labels = ["geometric mean", *(each.name for each in accounts[0].categories)]
    height = 0.8 / len(accounts)
    furthest = 1.0
    for number, account in enumerate(accounts):
        estimates = [account.mean, *(each.ratio for each in account.categories)]
        values = np.array([each.value for each in estimates])
        edges = np.array([each.interval or (each.value, each.value) for each in estimates])
        whiskers = np.abs(edges - values[:, None]).T
        places = np.arange(len(labels)) + (number - (len(accounts) - 1) / 2) * height
        axes.barh(places, values, height * 0.9, color=_colour(number, palette), label=account.name)
        axes.errorbar(values, places, xerr=whiskers, fmt="none", ecolor=palette[INK], elinewidth=0.9, capsize=2)
        furthest = max(furthest, float(edges.max()), float(values.max()))
        for place, value, edge in zip(places, values, edges.max(axis=1), strict=True):
            axes.annotate(
                f"{value:.2f}", (max(edge, value), place), (4, 0), textcoords="offset points",
                va="center", fontsize=8.5,
            )  # fmt: skip
    axes.axvline(1.0, color=palette[INK], linewidth=1, linestyle=(0, (4, 3)))
    axes.set_xlim(0, furthest * 1.12)
    axes.set_yticks(range(len(labels)), labels)
    axes.get_yticklabels()[0].set_fontweight("bold")
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.grid(axis="x", linewidth=0.6)
    axes.set_xlabel("times plain decoding")
    axes.set_title("Speed-up by category")
    if len(accounts) > 1:
        _legend(axes)


def _step_cost(axes: Axes, result: Result, palette: Palette) -> None:
    """What a pass over m rows costs, beside what m passes would."""
    ms = np.array(result.step_cost_ms)
    rows = np.arange(1, len(ms) + 1)
    axes.plot(rows, ms, color=_colour(0, palette), marker="o", markersize=4, label="one pass over m")
    top = float(ms.max()) * 1.15
    axes.plot(rows, ms[0] * rows, color=palette[INK], linewidth=1, linestyle=(0, (4, 3)), label="m passes over one")
    axes.set_ylim(0, top)
    axes.set_xlim(0.5, len(ms) + 0.5)
    axes.set_xticks(rows if len(rows) <= 16 else rows[::4])
    axes.grid(linewidth=0.6)
    axes.set_xlabel("m, rows verified in a pass")
    axes.set_ylabel("milliseconds")
    axes.set_title(f"t(m) after {result.step_cost_context} tokens")
    _legend(axes)


def _depth(axes: Axes, result: Result, palette: Palette) -> None:
    """Which share of the guesses at each depth was accepted."""
    for number, account in enumerate(result.accounts):
        counts = account.run.by_depth
        if not counts:
            continue
        depths = np.arange(1, len(counts) + 1)
        shares = [100 * each.share if each.drafted else np.nan for each in counts]
        most = max(each.drafted for each in counts)
        sizes = [10 + 90 * each.drafted / most for each in counts]
        colour = _colour(number, palette)
        axes.plot(depths, shares, color=colour, linewidth=1.4, label=account.name)
        axes.scatter(depths, shares, sizes, color=colour, zorder=3)
    axes.set_ylim(0, 105)
    axes.set_xlim(left=0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(linewidth=0.6)
    axes.set_xlabel("distance from the text, tokens (larger dots: more guesses)")
    axes.set_ylabel("accepted, % of verified")
    axes.set_title("Acceptance by depth")
    if len(result.accounts) > 1:
        _legend(axes)


def _round(axes: Axes, result: Result, palette: Palette) -> None:
    """Where the milliseconds of a token go."""
    labels = [PLAIN, *(account.name for account in result.accounts)]
    runs = [result.plain, *(account.run for account in result.accounts)]
    parts = (
        ("target pass", [run.target_s for run in runs]),
        ("draft passes", [run.draft_s for run in runs]),
        ("host", [run.between_s for run in runs]),
    )
    tokens = np.array([run.tokens for run in runs])
    left = np.zeros(len(labels))
    for number, (name, seconds) in enumerate(parts):
        widths = 1e3 * np.array(seconds) / tokens
        if widths.any():
            axes.barh(labels, widths, 0.62, left, color=palette[_PARTS[number]], label=name)
        left += widths
    for place, total in enumerate(left):
        axes.annotate(f"{total:.2f}", (float(total), place), (4, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, float(left.max()) * 1.15)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", linewidth=0.6)
    axes.set_xlabel("milliseconds a token")
    axes.set_title("Where the time goes")
    _legend(axes)
