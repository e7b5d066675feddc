"""Checkpoint in, ONNX bundle out: architectures, graph, quantization and parity."""

from ..models.manifest import WeightFormat
from .family import supported_families
from .parity import Parity
from .pipeline import ExportReport, Progress, export_checkpoint
from .recipe import FP32, INT4, INT8, ExportRecipe

__all__ = [
    "FP32",
    "INT4",
    "INT8",
    "ExportRecipe",
    "ExportReport",
    "Parity",
    "Progress",
    "WeightFormat",
    "export_checkpoint",
    "supported_families",
]
