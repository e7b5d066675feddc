"""Exporting checkpoints, GGUF files and ONNX models to bundles."""

from ..models.manifest import Method, WeightFormat
from ..models.progress import Progress
from .allocation.plan_costs import parse_budget
from .architectures import supported_families
from .calibration.calibration_text import DEFAULT_CALIBRATION_TOKENS
from .check.parity import Parity
from .destination import ExportResult
from .gguf import is_gguf
from .pipeline import export_checkpoint, export_model, find_source, may_be_quantized
from .plan_frontier import FrontierPlan, measure_frontier
from .quantization.methods import FP32, INT2, INT4, INT8
from .recipe import ExportRecipe, ExportRequest
from .upgrade import upgrade_model

__all__ = [
    "DEFAULT_CALIBRATION_TOKENS",
    "FP32",
    "INT2",
    "INT4",
    "INT8",
    "ExportRecipe",
    "ExportRequest",
    "ExportResult",
    "FrontierPlan",
    "Method",
    "Parity",
    "Progress",
    "WeightFormat",
    "export_checkpoint",
    "export_model",
    "find_source",
    "is_gguf",
    "may_be_quantized",
    "measure_frontier",
    "parse_budget",
    "supported_families",
    "upgrade_model",
]
