"""From evidence to probability: what guesses of a kind were worth so far, and what several kinds are worth together.

Two stages, both learned while decoding. A table per source holds the share of guesses that came true for each evidence
bucket. Where several sources speak about the same token, their log-odds are added with weights that are learned by
online logistic regression, one set of weights for every combination of sources (logistic mixing, Mahoney 2005, PAQ).
A source that has guesses but not this one is evidence too: against it, as strongly as its own best guess is good.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from .tree import Source

_PRIOR_WEIGHT: Final = 10.0
"""Observations that the prior of a bucket counts for."""
_SLOWEST: Final = 1 / 400
"""The least a new observation moves an estimate: older ones fade, because text changes."""
_LEARNING_RATE: Final = 0.015
_AGREEMENT: Final = 0.6
"""Starting weight of each source where several guess the same token: their evidence overlaps."""
_OBJECTION: Final = 0.25
"""Starting weight of a source that guesses something else."""
_LEAST, _MOST = 0.002, 0.995


def _stretch(probability: float) -> float:
    return math.log(probability / (1 - probability))


def _squash(log_odds: float) -> float:
    return 1 / (1 + math.exp(-log_odds))


class Prediction(NamedTuple):
    """A probability and what it was made from, to learn from its outcome."""

    probability: float
    evidence: Sequence[tuple[int, int]]
    """(source, cell) of every source that speaks; see `Mixer.cell`."""
    inputs: Sequence[float]
    """Where there is more than one: the log-odds of each, and 1."""
    weights: list[float]


class Mixer:
    """Turns evidence into probabilities and learns from what came true.

    A source's cells are its buckets, each once for the token it guesses and once for all other tokens.
    """

    def __init__(self, priors: Mapping[Source, Sequence[float]]) -> None:
        self._cells: dict[int, list[float]] = {}
        self._log_odds: dict[int, list[float]] = {}
        self._seen: dict[int, list[float]] = {}
        for source, prior in priors.items():
            others = [(1 - share) * 0.15 for share in prior]
            cells = [min(max(share, _LEAST), _MOST) for share in (*prior, *others)]
            self._cells[source] = cells
            self._log_odds[source] = [_stretch(share) for share in cells]
            self._seen[source] = [_PRIOR_WEIGHT] * len(cells)
        self._half: dict[int, int] = {source: len(prior) for source, prior in priors.items()}
        self._weights: dict[int, list[float]] = {}

    def against(self, source: int, bucket: int) -> int:
        """The cell for tokens other than the one that `source` guesses with `bucket`."""
        return bucket + self._half[source]

    def share(self, source: int, bucket: int) -> float:
        """The share of a source's guesses in a bucket that come true, as estimated now."""
        return self._cells[source][bucket]

    def predict(self, evidence: Sequence[tuple[int, int]]) -> Prediction:
        """The probability that a token comes next, given the cells of all sources that speak."""
        if len(evidence) == 1:
            source, cell = evidence[0]
            return Prediction(self._cells[source][cell], evidence, (), [])
        inputs = []
        kinds = 1
        for source, cell in evidence:
            inputs.append(self._log_odds[source][cell])
            kinds = kinds << 5 | source << 1 | (cell < self._half[source])
        weights = self._weights.get(kinds)
        if weights is None:
            weights = self._weights[kinds] = self._first_weights(evidence)
        # What the combination itself says, however sure each source is.
        inputs.append(1.0)
        log_odds = 0.0
        for weight, value in zip(weights, inputs, strict=True):
            log_odds += weight * value
        # Log-odds beyond 20 are certainty, and their exponential would overflow some way further.
        probability = _squash(20.0 if log_odds > 20.0 else -20.0 if log_odds < -20.0 else log_odds)
        probability = _LEAST if probability < _LEAST else _MOST if probability > _MOST else probability
        return Prediction(probability, evidence, inputs, weights)

    def _first_weights(self, evidence: Sequence[tuple[int, int]]) -> list[float]:
        """Weights for a combination of sources that was not met before."""
        guessed = [cell < self._half[source] for source, cell in evidence]
        weight = 1.0 if sum(guessed) == 1 else _AGREEMENT
        return [*(weight if each else _OBJECTION for each in guessed), 0.0]

    def learn(self, prediction: Prediction, came_true: bool) -> None:
        """Take in the outcome of a prediction."""
        truth = 1.0 if came_true else 0.0
        error = (truth - prediction.probability) * _LEARNING_RATE
        weights = prediction.weights
        for index, value in enumerate(prediction.inputs):
            weights[index] += error * value
        for source, cell in prediction.evidence:
            cells, seen = self._cells[source], self._seen[source]
            seen[cell] += 1
            share = cells[cell] + (truth - cells[cell]) * max(1 / seen[cell], _SLOWEST)
            cells[cell] = share = min(max(share, _LEAST), _MOST)
            self._log_odds[source][cell] = _stretch(share)
