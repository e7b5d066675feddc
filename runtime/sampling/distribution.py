"""Distributions of the next token, and the arithmetic of exact speculative sampling.

All sums are in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import numpy as np
import numpy.typing as npt

from .logit_stage import Logits
from .sampler import Sampler, drawn_index


class Purpose(IntEnum):
    """Uses of random numbers besides sampling a token of the text; see `uniforms_at`."""

    DRAFT = 1
    """Sampling draft tokens from a draft model."""
    ACCEPT = 2
    """Accepting or rejecting a sampled draft token."""


def uniforms_at(seed: int, position: int, count: int, purpose: Purpose, part: int = 0) -> npt.NDArray[np.float64]:
    """`count` random numbers in [0, 1), float64 `[count]`, for a position, a purpose and a part of it.

    Numbers of different purposes are independent of each other and of `uniform_at`, which uses purpose 0.
    """
    generator = np.random.Philox(key=seed | purpose << 64, counter=position << 64 | part << 128)
    return np.random.Generator(generator).random(count)


@dataclass(frozen=True, eq=False)
class Distribution:
    """Probabilities of the possible next tokens; all other tokens have probability 0.

    The cost of every method grows with the number `k` of possible tokens, not with the vocabulary.
    """

    ids: npt.NDArray[np.intp]
    """Token ids `[k]`, ascending."""
    probs: npt.NDArray[np.float64]
    """float64 `[k]`, summing to 1."""

    @classmethod
    def of(cls, sampler: Sampler, logits: Logits) -> Self:
        """The distribution of the next token that `sampler` chooses; for a greedy one, all of it on that token."""
        if sampler.params.greedy:
            return cls(np.array([sampler.choose(logits, 0)], np.intp), np.ones(1))
        ids, probabilities = sampler.probabilities(logits)
        return cls(ids.copy(), probabilities.copy())

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
