"""What changes logits before a token is chosen, and the probabilities of the tokens that may come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Logits: TypeAlias = npt.NDArray[np.float32]
Weights: TypeAlias = npt.NDArray[np.float64]


def log_softmax(logits: npt.NDArray[np.floating]) -> Weights:
    """Log-probabilities, float64 `[V]`, of logits `[V]`, some of which may be -infinity."""
    with np.errstate(invalid="ignore"):  # the sampler refuses what is not finite
        shifted = logits - np.float64(logits.max())
    normalized: Weights = shifted - np.log(np.exp(shifted).sum())
    return normalized


class LogitStage:
    """A step from the logits of one position to its token; this one changes nothing.

    What it returns may depend on the logits that it is given, on `tokens`, and on nothing else, so that a text does not
    depend on how many tokens a pass verifies.
    """

    magnifies = 1.0
    """By how much the difference of two logits may grow at most, as far as near ties are concerned."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        """Token ids of the sequence."""
        self.prompt_length = 0
        """Number of them that are the prompt's."""
        self.earlier: Sequence[int] = ()
        """Token ids of the answer that a full context has left out of the sequence."""

    def observe_prompt(self, tokens: list[int]) -> None:
        """Add tokens of the prompt to the sequence."""
        self.observe(tokens)
        self.prompt_length = len(self.tokens)

    def observe(self, tokens: list[int]) -> None:
        """Add tokens of the answer to the sequence."""
        self.tokens += tokens

    def shorten(self, size: int) -> None:
        """Forget the tokens after the first `size`, none of which is the prompt's."""
        del self.tokens[size:]

    def scores(self, logits: Logits) -> Logits:
        """Return the changed logits, float32 `[V]`, valid until the next call; `logits` is not modified."""
        return logits

    def weights(self, ids: npt.NDArray[np.intp], weights: Weights) -> Weights:
        """Change the weights of the tokens that may come, after temperature and filters; not used by greedy decoding.

        Args:
            ids: ascending token ids, `[k]`.
            weights: their probabilities up to a factor, float64 `[k]`; may be modified.

        Returns:
            The new weights, `[k]`; 0 leaves a token out, and one must not be 0.
        """
        del ids
        return weights
