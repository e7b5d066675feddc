"""The report of an export, as figures, tables and plots."""

from .compared_plans import PlanComparison
from .figures import (
    DraftFigures,
    LinearFigures,
    ModelReport,
    PlanFigures,
    PlanKind,
    SearchStep,
    Speed,
    linear_figures,
    plan_figures,
    search_steps,
)
from .page import as_values, page, write_report
from .tables import bits_text, gain_text, headlines, megabytes, quality_text

__all__ = [
    "DraftFigures",
    "LinearFigures",
    "ModelReport",
    "PlanComparison",
    "PlanFigures",
    "PlanKind",
    "SearchStep",
    "Speed",
    "as_values",
    "bits_text",
    "gain_text",
    "headlines",
    "linear_figures",
    "megabytes",
    "page",
    "plan_figures",
    "quality_text",
    "search_steps",
    "write_report",
]
