"""Checkpoint, GGUF file or foreign ONNX model in, ONNX bundle out: architectures, graph, quantization and parity."""

from ..models.manifest import Method, WeightFormat
from .allocation.budget import parse_budget
from .architectures.family import supported_families
from .check.parity import Parity
from .dispatch import export_model, find_source, has_own_formats
from .gguf import is_gguf
from .outcome import ExportReport
from .pipeline import export_checkpoint
from .progress import Progress
from .recipe import FP32, INT2, INT4, INT8, ExportRecipe
from .requests import USUAL_TOKENS, CalibrationRequest, DraftRequest, MixRequest
from .upgrade import upgrade_model

__all__ = [
    "FP32",
    "INT2",
    "INT4",
    "INT8",
    "USUAL_TOKENS",
    "CalibrationRequest",
    "DraftRequest",
    "ExportRecipe",
    "ExportReport",
    "Method",
    "MixRequest",
    "Parity",
    "Progress",
    "WeightFormat",
    "export_checkpoint",
    "export_model",
    "find_source",
    "has_own_formats",
    "is_gguf",
    "parse_budget",
    "supported_families",
    "upgrade_model",
]
