"""Whether weights with zero points can be shipped from this machine."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import ExportError
from ..models.manifest import WeightFormat
from .check.contract_session import multiplies_zero_points


def require_zero_points(forms: Iterable[WeightFormat]) -> None:
    """Check that what has zero points is multiplied as it should be (see `models.zero_point_check`).

    Raises:
        ExportError: it is not.
    """
    if any(form.zero_points and form.bits == 4 for form in forms) and not multiplies_zero_points():
        raise ExportError(
            "ONNX Runtime multiplies wrongly by weights of 4 bits with zero points on this processor",
            "leave --zero-points out, or upgrade onnxruntime",
        )
