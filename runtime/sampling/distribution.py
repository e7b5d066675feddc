"""Distributions of the next token, and the arithmetic of exact speculative sampling.

All sums are in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

_BLOCK: Final = 1024


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


@dataclass(frozen=True, eq=False)
class Distribution:
    """Probabilities of the possible next tokens; all other tokens have probability 0.

    The cost of every method grows with the number `k` of possible tokens, not with the vocabulary.
    """

    ids: npt.NDArray[np.intp]
    """Token ids `[k]`, ascending."""
    probs: npt.NDArray[np.float64]
    """float64 `[k]`, summing to 1."""

    def probability(self, token: int) -> float:
        """Probability of one token."""
        at = int(np.searchsorted(self.ids, token))
        return float(self.probs[at]) if at < self.ids.size and self.ids[at] == token else 0.0

    def draw(self, uniform: float) -> int:
        """The token at the point `uniform`, in [0, 1), of the cumulative distribution."""
        return int(self.ids[drawn_index(self.probs, uniform)])

    def excess(self, other: Distribution, scale: float = 1.0) -> npt.NDArray[np.float64]:
        """max(0, scale * self - other) for each of this distribution's tokens, float64 `[k]`."""
        difference = self.probs * scale
        if np.array_equal(self.ids, other.ids):
            difference -= other.probs
        else:
            _, at, other_at = np.intersect1d(self.ids, other.ids, assume_unique=True, return_indices=True)
            difference[at] -= other.probs[other_at]
        return np.maximum(difference, 0, out=difference)

    def residual(self, other: Distribution, scale: float = 1.0) -> Distribution:
        """The distribution proportional to `excess`: what to sample from after a token of `other` was rejected.

        Where rounding makes the excess 0 everywhere, this distribution itself.
        """
        excess = self.excess(other, scale)
        total = excess.sum()
        return Distribution(self.ids, excess / total) if total > 0 else self

    def without(self, token: int) -> Distribution:
        """The distribution conditional on not being `token`; empty if that was the only possible token."""
        kept = (self.ids != token) & (self.probs > 0)
        probs = self.probs[kept]
        return Distribution(self.ids[kept], probs / probs.sum())
