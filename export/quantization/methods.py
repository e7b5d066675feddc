"""The ways of choosing codes and scales, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from ...models.manifest import Method, WeightFormat
from ..checkpoint.source import QuantizedRows
from .codes import Float32Array
from .gptq import gptq_rows
from .hqq import hqq_rows
from .input_statistics import InputStatistics
from .k_quant import k_quant_rows
from .nearest import nearest_rows


class Quantizer(Protocol):
    """Puts rows into few bits."""

    def __call__(
        self, weights: Float32Array, form: WeightFormat, inputs: InputStatistics | None = None
    ) -> QuantizedRows:
        """Choose codes, scales and, where the format has them, zero points.

        Args:
            weights: float32 [N, K], finite.
            form: 2, 4 or 8 bits, the block, whether there are zero points and whether scales are powers of two.
            inputs: what is known of the K inputs; None where nothing is.

        Raises:
            InputError: the mean squares are not K finite numbers from 0 up.
        """
        ...


QUANTIZERS: Final[Mapping[Method, Quantizer]] = {
    Method.RTN: nearest_rows,
    Method.K_QUANT: k_quant_rows,
    Method.HQQ: hqq_rows,
    Method.GPTQ: gptq_rows,
}
