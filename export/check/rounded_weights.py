"""A checkpoint seen through its quantization: the weights an exported graph really computes with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...models.manifest import WeightFormat
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layout import fused_linears
from ..checkpoint.prefetch import in_order
from ..checkpoint.source import Float32Array, ModelSource, RowRange
from ..quantization.codes import dequantized


class RoundedWeights:
    """Reads like the checkpoint, with every unit's weights rounded to its format and back."""

    def __init__(self, checkpoint: ModelSource, config: DecoderConfig, plan: Mapping[str, WeightFormat]) -> None:
        self._checkpoint = checkpoint
        self._formats = {name: plan[linear.name] for linear in fused_linears(config) for name in linear.weights}

    def read(self, name: str) -> Float32Array:
        """A whole tensor that belongs to no unit: a norm or a bias."""
        return self._checkpoint.read(name)

    def read_rows(self, rows: RowRange) -> Float32Array:
        """Rows of a unit's matrix, rounded."""
        form = self._formats[rows.name]
        if form.bits == 32:
            return self._checkpoint.read_rows(rows)
        columns = self._checkpoint.shape(rows.name)[1]
        return dequantized(self._checkpoint.quantized(rows, form), columns, form)

    def chunks(self, name: str) -> Iterator[Float32Array]:
        """A unit's matrix from top to bottom, rounded."""
        return in_order(self.read_rows, self._checkpoint.row_ranges(name))
