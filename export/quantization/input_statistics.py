"""Statistics of the inputs of a linear, used to quantize its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """Averages over the calibration tokens of the K inputs x of a linear."""

    mean_square: Float32Array
    """E[x_j ** 2], float32 [K]: the cost of an error in a column of the weights."""
    mean_magnitude: Float32Array
    """E[|x_j|], float32 [K]."""
    second_moment: Float32Array | None = None
    """E[x xT], float32 [K, K], symmetric; large, so None where no method needs it."""
    tokens: int = 0
    """Number of tokens averaged over."""


class CorrectionTarget(NamedTuple):
    """What a quantized and corrected linear should approximate."""

    weights: Float32Array
    """Weights, float32 [N, K]."""
    inputs: InputStatistics | None
    """Statistics of the linear's inputs; None where unknown."""
