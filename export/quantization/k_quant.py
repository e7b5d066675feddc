"""k-quant: the scale of each block by search, after llama.cpp's `make_qx_quants` and ONNX Runtime's `k_quant`.

Scales around the usual one are tried, of both signs, since one sign reaches a step further below zero and the other
above. Each gives codes, the codes give the scale that fits them best by least squares, and the pair with the least
squared error is kept. Errors are weighted by the importance of their columns where that is known. Where it is not,
those two programs count errors of large weights more; counting all the same gave up to 9 % less KL on the models at
hand. Twice as many scales take twice the time and at most half a percent off the error.

With zero points each scale is tried with a few of them around the one that centres the block (llama.cpp's
`make_qkx2_quants` fits a minimum instead, which need not be a whole number of steps); signs then say nothing new.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ...models.manifest import WeightFormat
from ..checkpoint.source import QuantizedRows
from .codes import Float32Array, centred_zeros
from .input_statistics import InputStatistics
from .scale_search import Candidates, search_scales

_STRETCHES: Final = {
    2: (1.0, 0.55, 0.7, 0.85, -0.55, -0.7, -0.85),
    4: (1.0, 0.8, 0.85, 0.9, 0.95, 1.05, -0.85, -0.95),
    8: (1.0, 0.99, 1.01, -1.0),
}
"""Tried scales by bits, in units of the usual one, which is the first."""
_STRETCHES_WITH_ZEROS: Final = {2: (1.0, 0.55, 0.7, 0.85), 4: (1.0, 0.8, 0.85, 0.9, 0.95), 8: (1.0, 0.99)}
_POWERS: Final = (1.0, 0.5, 2.0, -1.0, -0.5, -2.0)
"""Tried scales where only powers of two are allowed."""
_AROUND: Final = {2: (-3, -2, -1, 0, 1, 2, 3), 4: (-1, 0, 1), 8: (0,)}
"""Tried zero points by bits, from the one that centres the block."""
_REFINEMENTS: Final = 2
"""How often the best scale is rounded with again and fitted again."""


def k_quant_rows(
    weights: Float32Array, weight_format: WeightFormat, inputs: InputStatistics | None = None
) -> QuantizedRows:
    """Rows in few bits; see `methods.Quantizer`."""
    return search_scales(weights, weight_format, inputs, _search_with_zeros if weight_format.zero_points else _search)


def _search(candidates: Candidates) -> None:
    weight_format = candidates.weight_format
    for stretch in _POWERS if weight_format.powers_of_two else _STRETCHES[weight_format.bits]:
        candidates.offer(_even(candidates, stretch))
    for _ in range(_REFINEMENTS):
        candidates.offer(candidates.scales)


def _search_with_zeros(candidates: Candidates) -> None:
    weight_format = candidates.weight_format
    last = (1 << weight_format.bits) - 1
    stretches = (
        [each for each in _POWERS if each > 0]
        if weight_format.powers_of_two
        else _STRETCHES_WITH_ZEROS[weight_format.bits]
    )
    for stretch in stretches:
        scales = _even(candidates, stretch)
        centred = centred_zeros(candidates.linears, scales, weight_format.bits)
        for shift in _AROUND[weight_format.bits]:
            candidates.offer(scales, np.clip(centred + np.float32(shift), 0, last))
    for _ in range(_REFINEMENTS):
        candidates.offer(candidates.scales, candidates.zeros)


def _even(candidates: Candidates, scale: float) -> Float32Array:
    return np.full(len(candidates.linears), scale, np.float32)
