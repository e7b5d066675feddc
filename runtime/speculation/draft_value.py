"""Estimates whether a draft model pass gains more than it costs.

Before a draft model pass, the probability of the best candidate from the free drafters is known. A small histogram for
each class of that probability is learned: how probable the best candidate is after the pass. The expected gain follows
from the histogram, in tokens, the same currency as the price of a token position. A draft model whose passes do not pay
is run occasionally all the same, after waits that double, because texts change.
"""

from __future__ import annotations

from typing import Final

from .backoff import Backoff

_CLASSES: Final = 6
"""Classes of the free drafters' best probability."""
_BINS: Final = 10
_PRIOR: Final = (0.02, 0.06, 0.08, 0.09, 0.1, 0.1, 0.11, 0.12, 0.14, 0.18)
"""Prior histogram of the best probability after a pass of an unknown draft model."""
_PRIOR_WEIGHT: Final = 20.0
_MAX_WEIGHT: Final = 400.0
_FIRST_WAIT: Final = 8
_MAX_WAIT: Final = 512


class DraftModelValue:
    """Learns what a draft model pass gains and decides where to run one."""

    def __init__(self) -> None:
        self._after = [[share * _PRIOR_WEIGHT for share in _PRIOR] for _ in range(_CLASSES)]
        self._weight = [_PRIOR_WEIGHT] * _CLASSES
        self._backoff = Backoff(_FIRST_WAIT, _MAX_WAIT)
        self._backoff.start()
        self.gain = 0.0
        """Expected gain of a pass at the anchor, in tokens, when it was last considered."""
        self.cost = 0.0
        """Tokens that plain decoding would produce in the time of that pass."""

    def pays(self, path_prob: float, free_prob: float, price: float, cost: float, *, at_anchor: bool) -> bool:
        """Whether to run the draft model at a node.

        Args:
            path_prob: path probability of the node.
            free_prob: probability of the free drafters' best candidate at the node.
            price: price of one more token position, in tokens.
            cost: cost of the draft model pass, in tokens.
            at_anchor: whether the node is the anchor, the only one where a pass is tried against expectation.
        """
        gain_without = max(0.0, path_prob * free_prob - price)
        kind = min(int(free_prob * _CLASSES), _CLASSES - 1)
        share = path_prob / (_BINS * self._weight[kind])
        gain_with = 0.0
        for index, weight in enumerate(self._after[kind]):
            value = share * (index + 0.5) * weight - price * weight / self._weight[kind]
            if value > 0:
                gain_with += value
        gain = gain_with - gain_without
        if at_anchor:
            self.gain, self.cost = gain, cost
        if gain > cost:
            if at_anchor:
                self._backoff.reset()
                self._backoff.start()
            return True
        if not at_anchor:
            return False
        if self._backoff.left > 1:
            self._backoff.count_down()
            return False
        self._backoff.start()
        return True

    def observe(self, free_prob: float, best_prob: float) -> None:
        """Learn from a pass.

        Args:
            free_prob: probability of the best candidate before the pass.
            best_prob: probability of the best candidate after it.
        """
        kind = min(int(free_prob * _CLASSES), _CLASSES - 1)
        bins = self._after[kind]
        if self._weight[kind] >= _MAX_WEIGHT:
            self._after[kind] = bins = [weight * 0.5 for weight in bins]
            self._weight[kind] = sum(bins)
        bins[min(int(best_prob * _BINS), _BINS - 1)] += 1
        self._weight[kind] += 1
