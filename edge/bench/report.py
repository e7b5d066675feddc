"""Writes a measurement as a self-contained HTML page, or its plots as a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, StrictUndefined

from ...models.atomic import write_atomically
from .bench_result import BenchResult
from .headline import reason_without_ratio
from .plots import DARK, LIGHT, css_variable, png, svg_plots
from .ratios import RoundTimes
from .table import acceptance_text, interval_text

_TEMPLATE: Final = Path(__file__).parent / "report.html.jinja"


def write_report(path: Path, result: BenchResult) -> None:
    """Write a PNG if the name ends in .png, else an HTML page. The file appears whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    write_atomically(path, png(result) if path.suffix.lower() == ".png" else page(result).encode())


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
        plots=svg_plots(result),
        light={css_variable(name): colour for name, colour in LIGHT.items()},
        dark={css_variable(name): colour for name, colour in DARK.items()},
        facts=_facts(result),
        notes=result.notes,
        reasons={mode.name: reason_without_ratio(mode, result.load) for mode in result.modes},
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
