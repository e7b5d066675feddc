"""Random numbers by position of a text, and what they draw.

The random number for a position depends only on the seed and the position (a counter-based generator: Philox, Salmon
et al. 2011), so a seed gives one text however many tokens a pass emits.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

_BLOCK: Final = 1024


def uniform_at(seed: int, position: int) -> float:
    """The random number in [0, 1) for a position of the text with this seed."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def drawn_index(weights: npt.NDArray[np.float64], uniform: float) -> int:
    """Index of the weight at the point `uniform`, in [0, 1), of their cumulative sum; it is positive.

    A cumulative sum of a whole vocabulary takes longer than its exponentials, so that of blocks finds the block first.

    Args:
        weights: float64 `[k]`, not negative, at least one positive.
        uniform: the point.
    """
    blocks = np.add.reduceat(weights, np.arange(0, weights.size, _BLOCK))
    block, rest = _point(blocks, uniform * blocks.sum())
    return block * _BLOCK + _point(weights[block * _BLOCK : (block + 1) * _BLOCK], rest)[0]


def _point(weights: npt.NDArray[np.float64], at: float) -> tuple[int, float]:
    """The index of the weight at a point of their cumulative sum, and where in it the point lies."""
    cumulative = np.cumsum(weights)
    # A product rounded up to the total would lie beyond the last positive weight.
    index = int(min(np.searchsorted(cumulative, at, side="right"), np.searchsorted(cumulative, cumulative[-1])))
    return index, at - float(cumulative[index - 1]) if index else at
