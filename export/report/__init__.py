"""What an export chose and what that costs, as tables and plots."""

from .compared_plans import compared_plans, nearest_plans
from .figures import DraftFigures, LinearFigures, ModelReport, PlanFigures, PlanKind, SearchStep, Speed
from .gather import linear_figures, plan_figures, search_steps
from .page import as_values, page, write_report
from .tables import heads_of, megabytes

__all__ = [
    "DraftFigures",
    "LinearFigures",
    "ModelReport",
    "PlanFigures",
    "PlanKind",
    "SearchStep",
    "Speed",
    "as_values",
    "compared_plans",
    "heads_of",
    "linear_figures",
    "megabytes",
    "nearest_plans",
    "page",
    "plan_figures",
    "search_steps",
    "write_report",
]
