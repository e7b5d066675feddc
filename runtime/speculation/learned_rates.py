"""What speculators learn: the acceptance of candidates, the value of draft model passes, and whether drafting pays.

Drafter evidence becomes candidate probabilities in two stages, both learned while decoding. A table per source holds
the acceptance rate of each evidence bucket. Where several sources have evidence about the same token, their log-odds
are added with weights learned by online logistic regression, one set of weights for every combination of sources
(logistic mixing, Mahoney 2005, PAQ). A source that proposes other tokens but not this one counts as evidence against
it, as strong as its own best candidate is good.

Before a draft model pass, the probability of the best candidate from the free drafters is known. A small histogram for
each class of that probability is learned: how probable the best candidate is after the pass. The expected gain follows
from the histogram, in tokens, the same currency as the price of a token position. A draft model whose passes do not
pay is run occasionally all the same, after waits that double, because texts change.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from .tree import Source

_PRIOR_WEIGHT: Final = 10.0
"""Number of observations that the prior of a bucket counts for."""
_MIN_STEP: Final = 1 / 400
"""Minimum weight of a new observation, so that older ones fade: texts change."""
_LEARNING_RATE: Final = 0.015
_AGREEMENT_WEIGHT: Final = 0.6
"""Initial weight of each source where several propose the same token: their evidence overlaps."""
_OBJECTION_WEIGHT: Final = 0.25
"""Initial weight of a source that proposes other tokens."""
_MIN_PROB, _MAX_PROB = 0.002, 0.995
_CLASSES: Final = 6
"""Classes of the free drafters' best probability."""
_BINS: Final = 10
_PASS_PRIOR: Final = (0.02, 0.06, 0.08, 0.09, 0.1, 0.1, 0.11, 0.12, 0.14, 0.18)
"""Prior histogram of the best probability after a pass of an unknown draft model."""
_PASS_PRIOR_WEIGHT: Final = 20.0
_MAX_WEIGHT: Final = 400.0
_FIRST_WAIT: Final = 8
_MAX_WAIT: Final = 512


def _logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


class Prediction(NamedTuple):
    """A probability and the evidence it was computed from, needed to learn from the outcome."""

    probability: float
    evidence: Sequence[tuple[int, int]]
    """(source, cell) of every source with candidates; see `Mixer`."""
    inputs: Sequence[float]
    """The log-odds of each source and a constant 1; empty if there is one source only."""
    weights: list[float]


class Mixer:
    """Computes candidate probabilities and learns from verification; answers that run at the same time share it.

    The cells of a source are its evidence buckets, each once for the token it proposes and once for all other tokens.

    Args:
        priors: for each source, the prior acceptance rate of every bucket.
    """

    def __init__(self, priors: Mapping[Source, Sequence[float]]) -> None:
        self._cells: dict[int, list[float]] = {}
        self._log_odds: dict[int, list[float]] = {}
        self._seen: dict[int, list[float]] = {}
        for source, prior in priors.items():
            others = [(1 - rate) * 0.15 for rate in prior]
            cells = [min(max(rate, _MIN_PROB), _MAX_PROB) for rate in (*prior, *others)]
            self._cells[source] = cells
            self._log_odds[source] = [_logit(rate) for rate in cells]
            self._seen[source] = [_PRIOR_WEIGHT] * len(cells)
        self._half: dict[int, int] = {source: len(prior) for source, prior in priors.items()}
        self._weights: dict[int, list[float]] = {}
        self.model_value: Final = DraftModelValue()
        """What a pass of the draft model gains."""

    def objection_cell(self, source: int, bucket: int) -> int:
        """The cell for tokens other than the one that `source` proposes with `bucket`."""
        return bucket + self._half[source]

    def acceptance_rate(self, source: int, bucket: int) -> float:
        """Current estimate of the share of a source's candidates in a bucket that are accepted."""
        return self._cells[source][bucket]

    def predict(self, evidence: Sequence[tuple[int, int]]) -> Prediction:
        """The probability that a token comes next.

        Args:
            evidence: (source, cell) of every source that has candidates at this place.
        """
        if len(evidence) == 1:
            source, cell = evidence[0]
            return Prediction(self._cells[source][cell], evidence, (), [])
        inputs = []
        combination = 1
        for source, cell in evidence:
            inputs.append(self._log_odds[source][cell])
            combination = combination << 5 | source << 1 | (cell < self._half[source])
        weights = self._weights.get(combination)
        if weights is None:
            proposing = [cell < self._half[source] for source, cell in evidence]
            weight = 1.0 if sum(proposing) == 1 else _AGREEMENT_WEIGHT
            weights = [*(weight if each else _OBJECTION_WEIGHT for each in proposing), 0.0]
            self._weights[combination] = weights
        # The last input is constant: its weight is the bias of the combination.
        inputs.append(1.0)
        log_odds = sum(map(operator.mul, weights, inputs))
        # Log-odds beyond 20 are clipped: larger ones would overflow the exponential.
        probability = 1 / (1 + math.exp(-min(max(log_odds, -20.0), 20.0)))
        return Prediction(min(max(probability, _MIN_PROB), _MAX_PROB), evidence, inputs, weights)

    def learn(self, prediction: Prediction, correct: bool) -> None:
        """Learn whether the predicted token was the next one."""
        truth = 1.0 if correct else 0.0
        error = (truth - prediction.probability) * _LEARNING_RATE
        weights = prediction.weights
        for index, value in enumerate(prediction.inputs):
            weights[index] += error * value
        for source, cell in prediction.evidence:
            cells, seen = self._cells[source], self._seen[source]
            seen[cell] += 1
            rate = cells[cell] + (truth - cells[cell]) * max(1 / seen[cell], _MIN_STEP)
            cells[cell] = rate = min(max(rate, _MIN_PROB), _MAX_PROB)
            self._log_odds[source][cell] = _logit(rate)


class DraftModelValue:
    """Learns what a draft model pass gains and decides where to run one."""

    def __init__(self) -> None:
        self._after = [[share * _PASS_PRIOR_WEIGHT for share in _PASS_PRIOR] for _ in range(_CLASSES)]
        self._weight = [_PASS_PRIOR_WEIGHT] * _CLASSES
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
            cost: cost of the draft model pass, in tokens; infinite if it must not be tried.
            at_anchor: whether the node is the anchor, the only one where a pass is tried against expectation.
        """
        gain_without = max(0.0, path_prob * free_prob - price)
        kind = min(int(free_prob * _CLASSES), _CLASSES - 1)
        share = path_prob / (_BINS * self._weight[kind])
        position = price / self._weight[kind]
        gain_with = sum(
            weight * max(share * (index + 0.5) - position, 0.0) for index, weight in enumerate(self._after[kind])
        )
        gain = gain_with - gain_without
        if at_anchor:
            self.gain, self.cost = gain, cost
        if gain > cost:
            if at_anchor:
                self._backoff.reset()
                self._backoff.start()
            return True
        if not at_anchor or cost == math.inf:
            return False
        if self._backoff.left > 1:
            self._backoff.left -= 1
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


class Backoff:
    """Rounds to wait before something that did not pay is tried again; each wait is twice as long as the one before.

    Args:
        first_wait: rounds of the first wait.
        max_wait: rounds of the longest wait.
    """

    def __init__(self, first_wait: int, max_wait: int) -> None:
        self.left = 0
        """Rounds left of the current wait, which the owner counts down; 0 when not waiting."""
        self._first = self._next = first_wait
        self._max = max_wait

    def start(self, min_wait: int = 0) -> None:
        """Start a wait of at least `min_wait` rounds."""
        self.left = max(self._next, min_wait)
        self._next = min(2 * self.left, self._max)

    def reset(self) -> None:
        """Make the next wait as short as the first one; called after a success."""
        self._next = self._first


class DraftingBalance:
    """Stops drafting for a while when it costs more than it gains.

    Keeps a running mean of the tokens a round gains by drafting, less the tokens that plain decoding would have
    produced in the time that drafting takes. When the mean is negative after a trial of several rounds, `backoff`
    starts.
    """

    _FIRST_WAIT: Final = 32
    _MAX_WAIT: Final = 4096
    _TRIAL_ROUNDS: Final = 8
    _HOPELESS: Final = -0.1
    """Mean below which a trial ends early and the wait is long: the model is so small that a lookup takes a
    considerable part of a pass."""
    _HOPELESS_TRIAL_ROUNDS: Final = 3
    _HOPELESS_MIN_WAIT: Final = 8 * _FIRST_WAIT
    _CHEAP_TRIAL_ROUNDS: Final = 24

    def __init__(self) -> None:
        self.backoff: Final = Backoff(self._FIRST_WAIT, self._MAX_WAIT)
        self.mean = 0.0
        """Running mean of the tokens gained per round of drafting."""
        self._rounds = 0

    def resume(self) -> None:
        """End the wait and start a new trial."""
        self.backoff.left = 0
        self._rounds = 0

    def observe(self, balance: float, *, cheap: bool = False) -> None:
        """Add the balance of one round of drafting.

        Args:
            balance: tokens gained less tokens spent.
            cheap: whether drafting costs so little that it is given a longer trial.
        """
        self._rounds += 1
        self.mean += (balance - self.mean) * max(1 / self._rounds, 0.02)
        hopeless = self.mean < self._HOPELESS and self._rounds >= self._HOPELESS_TRIAL_ROUNDS
        trial = self._CHEAP_TRIAL_ROUNDS if cheap else self._TRIAL_ROUNDS
        if not hopeless and (self._rounds < trial or self.mean >= 0):
            if self._rounds > 4 * self._TRIAL_ROUNDS:
                self.backoff.reset()
            return
        self.backoff.start(self._HOPELESS_MIN_WAIT if hopeless else 0)
        self._rounds = 0
