"""What is known of a linear's inputs when its weights are put into few bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """Averages over the tokens of a calibration text, of the K inputs x of one linear."""

    mean_square: Float32Array
    """E[x_j ** 2], float32 [K]: how much an error in a column of the weights costs."""
    mean_magnitude: Float32Array
    """E[|x_j|], float32 [K]."""
    second_moment: Float32Array | None = None
    """E[x xT], float32 [K, K], symmetric; None where no method asked for it, since it is large."""
    tokens: int = 0
    """How many tokens it is an average of."""


class CorrectionTarget(NamedTuple):
    """What a linear should compute, of the inputs it gets."""

    weights: Float32Array
    """[N, K]."""
    inputs: InputStatistics | None
    """None where nothing is known of them."""
