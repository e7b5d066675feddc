"""Exporting checkpoints, GGUF files and ONNX models to bundles."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..models.manifest import Method as Method
    from ..models.manifest import WeightFormat as WeightFormat
    from ..models.progress import Progress as Progress
    from .allocation.plan_costs import parse_budget as parse_budget
    from .architectures import supported_families as supported_families
    from .calibration.calibration_text import DEFAULT_CALIBRATION_TOKENS as DEFAULT_CALIBRATION_TOKENS
    from .check.parity import Parity as Parity
    from .destination import ExportResult as ExportResult
    from .gguf.gguf_model import is_gguf as is_gguf
    from .pipeline import export_checkpoint as export_checkpoint
    from .pipeline import export_model as export_model
    from .pipeline import find_source as find_source
    from .pipeline import may_be_quantized as may_be_quantized
    from .plan_frontier import FrontierPlan as FrontierPlan
    from .plan_frontier import measure_frontier as measure_frontier
    from .quantization.methods import FP32 as FP32
    from .quantization.methods import INT4 as INT4
    from .quantization.methods import INT8 as INT8
    from .recipe import ExportRecipe as ExportRecipe
    from .upgrade.pipeline import upgrade_model as upgrade_model

_MODULES = {
    "..models.manifest": ("Method", "WeightFormat"),
    "..models.progress": ("Progress",),
    ".allocation.plan_costs": ("parse_budget",),
    ".architectures": ("supported_families",),
    ".calibration.calibration_text": ("DEFAULT_CALIBRATION_TOKENS",),
    ".check.parity": ("Parity",),
    ".destination": ("ExportResult",),
    ".gguf.gguf_model": ("is_gguf",),
    ".pipeline": ("export_checkpoint", "export_model", "find_source", "may_be_quantized"),
    ".plan_frontier": ("FrontierPlan", "measure_frontier"),
    ".quantization.methods": ("FP32", "INT4", "INT8"),
    ".recipe": ("ExportRecipe",),
    ".upgrade.pipeline": ("upgrade_model",),
}
"""Names by the module that defines them, which is imported when one of them is first used (PEP 562): the options of an
export are shown where its extra is not installed."""


def _imported(name: str) -> object:
    """Import the module of a public name.

    Raises:
        AttributeError: the package has no such name.
    """
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module, __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:
    # Type checkers would take any name for one of the package if they saw this.
    __getattr__ = _imported
