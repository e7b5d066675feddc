"""Laws of the next token, and the arithmetic on them that exact speculative sampling needs; sums are in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Distribution:
    """Probabilities of the tokens that can come next; all others have none. Work grows with `k`, not the vocabulary."""

    ids: npt.NDArray[np.intp]
    """Token ids `[k]`, ascending."""
    probs: npt.NDArray[np.float64]
    """float64 `[k]`, summing to 1."""

    def probability(self, token: int) -> float:
        """Of one token; 0 where the law does not have it."""
        at = int(np.searchsorted(self.ids, token))
        return float(self.probs[at]) if at < self.ids.size and self.ids[at] == token else 0.0

    def draw(self, uniform: float) -> int:
        """The token at `uniform`, in [0, 1), of the cumulative law."""
        cumulative = np.cumsum(self.probs)
        at = np.searchsorted(cumulative, uniform * cumulative[-1], side="right")
        # A product rounded up to the total would lie beyond the last token that has any probability.
        return int(self.ids[min(at, np.searchsorted(cumulative, cumulative[-1]))])

    def excess(self, other: Distribution, scale: float = 1.0) -> npt.NDArray[np.float64]:
        """max(0, scale * self - other) at this law's tokens, float64 `[k]`."""
        left = self.probs * scale
        if np.array_equal(self.ids, other.ids):
            left -= other.probs
        else:
            at, other_at = _shared(self.ids, other.ids)
            left[at] -= other.probs[other_at]
        return np.maximum(left, 0, out=left)

    def residual(self, other: Distribution, scale: float = 1.0) -> Distribution:
        """The law proportional to `excess`: what is left of this one once `other` has had its chance.

        This law itself where nothing is left, which only rounding can bring about.
        """
        left = self.excess(other, scale)
        total = left.sum()
        return Distribution(self.ids, left / total) if total > 0 else self

    def without(self, token: int) -> Distribution:
        """The law given that it is not `token`; of no tokens if that was the only one."""
        kept = (self.ids != token) & (self.probs > 0)
        probs = self.probs[kept]
        return Distribution(self.ids[kept], probs / probs.sum())


def _shared(
    ids: npt.NDArray[np.intp], others: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Where the ids that are in both lie in each; the shorter is looked up in the longer."""
    if others.size > ids.size:
        other_at, at = _shared(others, ids)
        return at, other_at
    if not others.size:
        return np.empty(0, np.intp), np.empty(0, np.intp)
    at = np.minimum(np.searchsorted(ids, others), ids.size - 1)
    found = np.flatnonzero(ids[at] == others)
    return at[found], found
