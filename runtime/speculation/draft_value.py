"""Whether asking a draft model pays: what it is expected to add, against the time it takes.

Known before it is asked: how sure the free predictors are. Learned: how sure all together are after it was asked, as a
small histogram for every class of the former. From those follow the tokens gained by asking, in the same currency as a
row's price. A model that does not pay is asked once in a while all the same, with doubling waits, because texts change.
"""

from __future__ import annotations

from typing import Final

_FREE_CLASSES: Final = 6
_BINS: Final = 10
_PRIOR: Final = (0.02, 0.06, 0.08, 0.09, 0.1, 0.1, 0.11, 0.12, 0.14, 0.18)
"""Of the best probability after asking a model nothing is known about."""
_PRIOR_WEIGHT: Final = 20.0
_MOST_WEIGHT: Final = 400.0
_FIRST_WAIT: Final = 8
_LONGEST_WAIT: Final = 512


class DraftWorth:
    """Expected gain of asking the draft model."""

    def __init__(self) -> None:
        self._after = [[share * _PRIOR_WEIGHT for share in _PRIOR] for _ in range(_FREE_CLASSES)]
        self._weight = [_PRIOR_WEIGHT] * _FREE_CLASSES
        self._idle = 0
        self._wait = _FIRST_WAIT
        self.gain = 0.0
        """Tokens that asking at the anchor promised the last time it was considered."""
        self.cost = 0.0
        """Tokens that plain decoding would have given in the time asking takes."""

    def pays(self, reached: float, free: float, price: float, cost: float, *, first: bool) -> bool:
        """Whether to ask.

        Args:
            reached: path probability of the node to be continued.
            free: probability of the best guess the free predictors have there.
            price: of a row.
            cost: of asking; like `price` in tokens.
            first: whether the node is the anchor, where alone the model is asked against expectation.
        """
        without = max(0.0, reached * free - price)
        kind = min(int(free * _FREE_CLASSES), _FREE_CLASSES - 1)
        share = reached / (_BINS * self._weight[kind])
        after = 0.0
        for index, weight in enumerate(self._after[kind]):
            value = share * (index + 0.5) * weight - price * weight / self._weight[kind]
            if value > 0:
                after += value
        gain = after - without
        if first:
            self.gain, self.cost = gain, cost
        if gain > cost:
            if first:
                self._idle, self._wait = 0, _FIRST_WAIT
            return True
        if not first:
            return False
        self._idle += 1
        if self._idle < self._wait:
            return False
        self._idle, self._wait = 0, min(2 * self._wait, _LONGEST_WAIT)
        return True

    def observe(self, free: float, best: float) -> None:
        """Take in how sure the best guess is after the model was asked."""
        kind = min(int(free * _FREE_CLASSES), _FREE_CLASSES - 1)
        bins = self._after[kind]
        if self._weight[kind] >= _MOST_WEIGHT:
            self._after[kind] = bins = [weight * 0.5 for weight in bins]
            self._weight[kind] = sum(bins)
        bins[min(int(best * _BINS), _BINS - 1)] += 1
        self._weight[kind] += 1
