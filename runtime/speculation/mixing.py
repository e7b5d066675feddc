"""Turns drafter evidence into candidate probabilities, and learns from the outcomes.

There are two stages, both learned while decoding. A table per source holds the acceptance rate of each evidence bucket.
Where several sources have evidence about the same token, their log-odds are added with weights learned by online
logistic regression, one set of weights for every combination of sources (logistic mixing, Mahoney 2005, PAQ). A source
that proposes other tokens but not this one counts as evidence against it, as strong as its own best candidate is good.
"""

from __future__ import annotations

import math
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


def _logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


def _sigmoid(log_odds: float) -> float:
    return 1 / (1 + math.exp(-log_odds))


class Prediction(NamedTuple):
    """A probability and the evidence it was computed from, needed to learn from the outcome."""

    probability: float
    evidence: Sequence[tuple[int, int]]
    """(source, cell) of every source with candidates; see `Mixer`."""
    inputs: Sequence[float]
    """The log-odds of each source and a constant 1; empty if there is one source only."""
    weights: list[float]


class Mixer:
    """Computes candidate probabilities and learns from verification.

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
            weights = self._weights[combination] = self._initial_weights(evidence)
        # The last input is constant: its weight is the bias of the combination.
        inputs.append(1.0)
        log_odds = 0.0
        for weight, value in zip(weights, inputs, strict=True):
            log_odds += weight * value
        # Log-odds beyond 20 are clipped: larger ones would overflow the exponential.
        probability = _sigmoid(20.0 if log_odds > 20.0 else -20.0 if log_odds < -20.0 else log_odds)
        probability = _MIN_PROB if probability < _MIN_PROB else _MAX_PROB if probability > _MAX_PROB else probability
        return Prediction(probability, evidence, inputs, weights)

    def _initial_weights(self, evidence: Sequence[tuple[int, int]]) -> list[float]:
        """The weights of a combination of sources that has not occurred before."""
        proposing = [cell < self._half[source] for source, cell in evidence]
        weight = 1.0 if sum(proposing) == 1 else _AGREEMENT_WEIGHT
        return [*(weight if each else _OBJECTION_WEIGHT for each in proposing), 0.0]

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
