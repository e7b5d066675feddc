"""What an export chose and what that costs, as tables and plots."""

from .figures import (
    DraftFigures,
    ModelReport,
    PlanFigures,
    PlanKind,
    SearchStep,
    Speed,
    UnitFigures,
)
from .page import as_values, page, write_report
from .tables import heads_of

__all__ = [
    "DraftFigures",
    "ModelReport",
    "PlanFigures",
    "PlanKind",
    "SearchStep",
    "Speed",
    "UnitFigures",
    "as_values",
    "heads_of",
    "page",
    "write_report",
]
