"""What an export chose and what that costs, as tables and plots."""

from .compared_plans import compared_plans, nearest_plans
from .figures import DraftFigures, ModelReport, PlanFigures, PlanKind, SearchStep, Speed, UnitFigures
from .gather import plan_figures, search_steps, unit_figures
from .page import as_values, page, write_report
from .tables import heads_of, megabytes

__all__ = [
    "DraftFigures",
    "ModelReport",
    "PlanFigures",
    "PlanKind",
    "SearchStep",
    "Speed",
    "UnitFigures",
    "as_values",
    "compared_plans",
    "heads_of",
    "megabytes",
    "nearest_plans",
    "page",
    "plan_figures",
    "search_steps",
    "unit_figures",
    "write_report",
]
