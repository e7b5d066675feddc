"""A checkpoint seen through its quantization: the weights an exported graph really computes with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..models.manifest import WeightFormat
from .checkpoint import Checkpoint, Float32Array
from .config import DecoderConfig
from .layout import units_of
from .quantize import dequantize_rows, quantize_rows


class RoundedWeights:
    """Reads like the checkpoint, with every unit's weights rounded to its format and back."""

    def __init__(self, checkpoint: Checkpoint, config: DecoderConfig, plan: Mapping[str, WeightFormat]) -> None:
        self._checkpoint = checkpoint
        self._formats = {name: plan[unit.name] for unit in units_of(config) for name in unit.weights}

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's dimensions."""
        return self._checkpoint.shape(name)

    def read(self, name: str) -> Float32Array:
        """A whole tensor that is not quantized: a norm or a bias."""
        return self._checkpoint.read(name)

    def read_rows(self, name: str, start: int, stop: int) -> Float32Array:
        """Rows `start` to `stop` of a unit's matrix, rounded."""
        rows, form = self._checkpoint.read_rows(name, start, stop), self._formats[name]
        if form.bits == 32:
            return rows
        return dequantize_rows(*quantize_rows(rows, form), rows.shape[1], form)

    def pieces(self, name: str) -> Iterator[tuple[int, int]]:
        """Row ranges that cover a matrix."""
        return self._checkpoint.pieces(name)
