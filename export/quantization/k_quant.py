"""k-quant: the scale of each block by search, after llama.cpp's `make_qx_quants` and ONNX Runtime's `k_quant`.

Scales around the usual one are tried, of both signs, since one sign reaches a step further below zero and the other
above. Each gives codes, the codes give the scale that fits them best by least squares, and the pair with the least
squared error is kept. Errors are weighted by the importance of their columns where that is known. Where it is not,
those two programs count errors of large weights more; counting all the same gave up to 9 % less KL on the models at
hand. Twice as many scales take twice the time and at most half a percent off the error.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ...models.manifest import WeightFormat
from ..source import Coded
from .codes import Float32Array
from .scale_search import BestFit, rounded, search_scales
from .statistics import InputStatistics

_STRETCHES: Final = {
    2: (1.0, 0.55, 0.7, 0.85, -0.55, -0.7, -0.85),
    4: (1.0, 0.8, 0.85, 0.9, 0.95, 1.05, -0.85, -0.95),
    8: (1.0, 0.99, 1.01, -1.0),
}
"""Tried scales by bits, in units of the usual one, which is the first."""
_REFINEMENTS: Final = 2
"""How often the best scale is rounded with again and fitted again."""


def k_quant_rows(weights: Float32Array, form: WeightFormat, inputs: InputStatistics | None = None) -> Coded:
    """Rows in few bits; see `methods.Quantizer`."""
    return search_scales(weights, form, None if inputs is None else inputs.mean_square, _search)


def _search(units: Float32Array, shares: Float32Array | None, bits: int) -> Float32Array:
    best = BestFit(units, shares)
    for stretch in _STRETCHES[bits]:
        best.offer(rounded(units, np.full(len(units), stretch, np.float32), bits))
    for _ in range(_REFINEMENTS):
        best.offer(rounded(units, best.scales, bits))
    return best.scales
