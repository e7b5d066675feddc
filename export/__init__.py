"""Checkpoint, GGUF file or foreign ONNX model in, ONNX bundle out: architectures, graph, quantization and parity."""

from ..models.manifest import Method, WeightFormat
from .dispatch import export_model, find_source, has_own_formats
from .family import supported_families
from .gguf import is_gguf
from .parity import Parity
from .pipeline import ExportReport, export_checkpoint
from .progress import Progress
from .recipe import FP32, INT2, INT4, INT8, ExportRecipe
from .upgrade import upgrade_model

__all__ = [
    "FP32",
    "INT2",
    "INT4",
    "INT8",
    "ExportRecipe",
    "ExportReport",
    "Method",
    "Parity",
    "Progress",
    "WeightFormat",
    "export_checkpoint",
    "export_model",
    "find_source",
    "has_own_formats",
    "is_gguf",
    "supported_families",
    "upgrade_model",
]
