"""The ways of choosing codes and scales, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from ..models.manifest import Method, WeightFormat
from .hqq import hqq_rows
from .k_quant import k_quant_rows
from .quantize import Float32Array, UInt8Array, quantize_rows


class Quantizer(Protocol):
    """Puts rows into few bits."""

    def __call__(
        self, weights: Float32Array, form: WeightFormat, importance: Float32Array | None = None
    ) -> tuple[UInt8Array, Float32Array]:
        """Choose codes and scales.

        Args:
            weights: float32 [N, K], finite.
            form: 2, 4 or 8 bits and the block.
            importance: how much an error in each of the K columns costs, from 0 up: the mean square of the column's
                input, say. None where nothing is known.

        Returns:
            Packed codes, uint8 [N, blocks, block * bits / 8], and scales, float32 [N, blocks].

        Raises:
            InputError: the importance is not K finite numbers from 0 up.
        """
        ...


def _round_to_nearest(
    weights: Float32Array,
    form: WeightFormat,
    importance: Float32Array | None = None,  # noqa: ARG001 -- it has no say where the extreme decides
) -> tuple[UInt8Array, Float32Array]:
    return quantize_rows(weights, form)


QUANTIZERS: Final[Mapping[Method, Quantizer]] = {
    Method.RTN: _round_to_nearest,
    Method.K_QUANT: k_quant_rows,
    Method.HQQ: hqq_rows,
}
