"""Exporting checkpoints, GGUF files and ONNX models to bundles."""

from ..models.manifest import Method, WeightFormat
from ..models.progress import Progress
from .allocation.budget import parse_budget
from .architectures import supported_families
from .check.parity import Parity
from .destination import ExportResult
from .drafts.head_checkpoint import read_head_kind
from .drafts.mtp_checkpoint import has_mtp_module
from .gguf import is_gguf
from .npu.npu_request import NpuRequest
from .pipeline import export_checkpoint, export_model, find_source, may_be_quantized
from .plan_frontier import FrontierPlan, measure_frontier
from .recipe import (
    DEFAULT_CALIBRATION_TOKENS,
    FP32,
    INT2,
    INT4,
    INT8,
    CalibrationRequest,
    DraftRequest,
    ExportRecipe,
    ExportRequest,
    HeadRequest,
    HeadVocabulary,
    MixedPrecisionRequest,
)
from .upgrade import upgrade_model

__all__ = [
    "DEFAULT_CALIBRATION_TOKENS",
    "FP32",
    "INT2",
    "INT4",
    "INT8",
    "CalibrationRequest",
    "DraftRequest",
    "ExportRecipe",
    "ExportRequest",
    "ExportResult",
    "FrontierPlan",
    "HeadRequest",
    "HeadVocabulary",
    "Method",
    "MixedPrecisionRequest",
    "NpuRequest",
    "Parity",
    "Progress",
    "WeightFormat",
    "export_checkpoint",
    "export_model",
    "find_source",
    "has_mtp_module",
    "is_gguf",
    "may_be_quantized",
    "measure_frontier",
    "parse_budget",
    "read_head_kind",
    "supported_families",
    "upgrade_model",
]
