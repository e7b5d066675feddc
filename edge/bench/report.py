"""A measurement as one file: an HTML page that needs nothing else, or a PNG of its plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, StrictUndefined

from ...models.atomic import write_atomically
from .bench_result import Result
from .plots import DARK, LIGHT, png, svg_plots, variable
from .ratios import PLAIN
from .report_name import check_report_name
from .table import share, within

_TEMPLATE: Final = Path(__file__).parent / "report.html.jinja"


def write_report(path: Path, result: Result) -> None:
    """Write the report that the name's ending asks for; a reader sees the old file or the whole new one.

    Raises:
        InputError: the name ends in neither .html nor .png.
        OSError: the file cannot be written.
    """
    check_report_name(path)
    write_atomically(path, png(result) if path.suffix.lower() == ".png" else page(result).encode())


def page(result: Result) -> str:
    """The HTML page."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=False)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        model=result.conditions.model,
        conditions=result.conditions,
        accounts=result.accounts,
        plain=result.plain,
        runs={PLAIN: result.plain, **{account.name: account.run for account in result.accounts}},
        plots=svg_plots(result),
        light={variable(name): colour for name, colour in LIGHT.items()},
        dark={variable(name): colour for name, colour in DARK.items()},
        facts=_facts(result),
        notes=result.notes,
        share=share,
        within=within,
    )


def _facts(result: Result) -> dict[str, Any]:
    conditions = result.conditions
    return {
        "prompts": f"{conditions.conversations} conversations of {conditions.source}, turns: {conditions.turns}",
        "most tokens an answer": min(conditions.max_tokens, conditions.context),
        "temperature": "0 (greedy)" if conditions.temperature == 0 else conditions.temperature,
        "context": conditions.context,
        "device": conditions.device,
        "threads": conditions.threads or "one per physical core",
        **result.machine,
    }
