"""Log-probabilities of chosen tokens and of their alternatives, from logits."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np

from .logit_stage import Logits
from .sampler import largest_indices

MAX_ALTERNATIVES: Final = 20
"""Largest number of alternatives per token, as in OpenAI's API."""
_LEAST: Final = -9999.0
"""Stands for the log-probability of an impossible token, as in OpenAI's API, so that sums are finite."""


class PositionLogprobs(NamedTuple):
    """Log-probabilities at one position of an answer."""

    token_id: int
    """The token of the answer."""
    logprob: float
    """Natural logarithm of its probability."""
    top: tuple[tuple[int, float], ...]
    """The most probable token ids and their log-probabilities, the most probable first."""


class LogprobTotals(NamedTuple):
    """Sums over the log-probabilities of tokens."""

    tokens: int = 0
    total: float = 0.0
    squares: float = 0.0

    def plus(self, logprobs: Iterable[float]) -> LogprobTotals:
        """The sums with further tokens added."""
        tokens, total, squares = self
        for logprob in logprobs:
            finite = max(logprob, _LEAST)
            tokens, total, squares = tokens + 1, total + finite, squares + finite * finite
        return LogprobTotals(tokens, total, squares)

    def joined(self, other: LogprobTotals) -> LogprobTotals:
        """The sums over the tokens of both."""
        return LogprobTotals(self.tokens + other.tokens, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> float:
        """Mean log-probability of a token; minus infinity without tokens."""
        return self.total / self.tokens if self.tokens else -math.inf

    @property
    def variance(self) -> float:
        """Variance of the log-probabilities; 0 without tokens."""
        return max(self.squares / self.tokens - self.mean**2, 0.0) if self.tokens else 0.0


NO_LOGPROBS: Final = LogprobTotals()
"""The sums over no tokens."""


class LogSoftmax:
    """Computes log-probabilities of the model's own distribution: before temperature, filters, penalties and biases.

    Differences and exponentials are float32 and their sum is float64, so a log-probability is within 1e-6 of that of
    float64 arithmetic, relative to the largest logit.

    Args:
        alternatives: number of the most probable tokens to give at every position.
        vocab_size: number of logits.
    """

    def __init__(self, alternatives: int, vocab_size: int) -> None:
        self._alternatives: Final = min(alternatives, vocab_size)
        self._weights = np.empty(vocab_size, np.float32)
        self._mask = np.empty(vocab_size, np.bool_)

    def at(self, logits: Logits, token_id: int) -> PositionLogprobs:
        """Log-probabilities at the position of a token.

        Args:
            logits: float32 `[V]`, finite or -infinity; not modified.
            token_id: the token that was chosen there.
        """
        largest = logits.max()
        np.subtract(logits, largest, out=self._weights)
        np.exp(self._weights, out=self._weights)
        log_sum = float(largest) + math.log(self._weights.sum(dtype=np.float64))
        top: list[tuple[int, float]] = []
        if self._alternatives:
            ids = largest_indices(logits, self._alternatives, self._mask)
            # Ascending ids in a stable order: of equal logits, the lowest id comes first, as in greedy decoding.
            ids = ids[np.argsort(-logits[ids], kind="stable")[: self._alternatives]]
            pairs = zip(ids.tolist(), logits[ids].tolist(), strict=True)
            top = [(token, min(logit - log_sum, 0.0)) for token, logit in pairs if logit > -math.inf]
        return PositionLogprobs(token_id, min(logits.item(token_id) - log_sum, 0.0), tuple(top))
