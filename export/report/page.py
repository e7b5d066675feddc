"""Writes a report as `report.html`, a self-contained page, and as `report.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, StrictUndefined

from ...models.atomic import write_atomically
from ...models.bundle import REPORT_DATA_NAME, REPORT_PAGE_NAME
from ...models.manifest import WeightFormat
from .figures import ModelReport
from .plots import grids_of, plots_of
from .tables import headlines, tables_of

_TEMPLATE: Final = Path(__file__).parent / "report.html.jinja"
_DIGITS: Final = 6


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
    )


def as_values(report: ModelReport) -> dict[str, Any]:
    """The report as plain values, for JSON."""
    values: dict[str, Any] = _plain(report)
    values["bits_per_weight_read"] = _plain(report.chosen.bits_per_weight)
    values["kl_against_uniform"] = _plain(report.against_uniform)
    values["kl_against_nearest"] = _plain(report.against_nearest)
    values["kl_against_rule"] = _plain(report.against_rule)
    return values


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
