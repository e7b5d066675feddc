"""The first token of an answer by its rank, so that several answers begin differently."""

from __future__ import annotations

from typing import Final

import numpy as np

from ..sampling.logit_stage import Logits, LogitStage


class FirstToken(LogitStage):
    """Leaves one token to choose from at one position, and all elsewhere; see `GenerateOptions.branch`.

    Args:
        position: number of tokens before it.
        rank: 0 for the likeliest token; of equal logits, the lowest id has the lower rank. Where fewer tokens may come,
            the least likely one is taken.
    """

    def __init__(self, position: int, rank: int) -> None:
        super().__init__()
        self._position: Final = position
        self._rank: Final = rank

    def scores(self, logits: Logits) -> Logits:
        """The logit of the token of the rank; -infinity for all others."""
        if len(self.tokens) != self._position or not np.isfinite(logits.max()):
            return logits
        ranked = np.argsort(-logits, kind="stable")
        token = ranked[min(self._rank, int((logits > -np.inf).sum()) - 1)]
        scores = np.full_like(logits, -np.inf)
        scores[token] = logits[token]
        return scores
