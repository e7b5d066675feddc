"""Distributions for sampled drafts without a draft model: the target's own, where the last tokens occurred before.

A model that answers one prompt several times, or reasons at length, meets the same few tokens again and again, and its
distribution after them is much the same. So its most probable tokens at every verified position are kept, by the last
one to four tokens, and averaged (STAND: Song et al. 2025, "Accelerated test-time scaling with model-free speculative
sampling"). Probabilities are kept and not counts: tokens sampled from counts are accepted no more often than the most
frequent one is matched (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from ...sampling.distribution import Distribution
from ...sampling.logit_stage import Logits
from ...sampling.sampler import Sampler, SamplingParams, largest_indices
from ..tree import Source
from .interface import Path
from .sampled import DistributionSource

_ORDER: Final = 4
"""Number of tokens of the longest context."""
_KEPT: Final = 10
"""Number of most probable tokens that are kept of a context."""
_MOST: Final = 1 << 14
"""Number of contexts that are kept, the latest ones: about 15 MB."""
_IMPOSSIBLE: Final = -1e30
_PLAIN: Final = SamplingParams()


class TargetNgrams:
    """Sums of the probabilities that the target gave its most probable tokens after the last one to four tokens."""

    def __init__(self) -> None:
        self._sums: dict[Path, dict[int, float]] = {}

    def learn(self, context: Path, logits: Logits) -> None:
        """Add the target's logits float32 `[V]` after the tokens of `context`."""
        tokens = largest_indices(logits, _KEPT, np.empty(logits.size, np.bool_))
        tokens = tokens[np.argsort(-logits[tokens], kind="stable")[:_KEPT]]
        weights = np.exp(logits[tokens] - logits.max(), dtype=np.float64)
        seen = list(zip(tokens.tolist(), (weights / weights.sum()).tolist(), strict=True))
        for order in range(1, min(_ORDER, len(context)) + 1):
            key = context[-order:]
            sums = self._sums.pop(key, {})
            for token, probability in seen:
                sums[token] = sums.get(token, 0.0) + probability
            self._sums[key] = dict(sorted(sums.items(), key=lambda each: -each[1])[:_KEPT])
        while len(self._sums) > _MOST:
            del self._sums[next(iter(self._sums))]

    def after(self, context: Path) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]] | None:
        """Ascending token ids and their sums, after the longest end of `context` that is known; None if none is."""
        for order in range(min(_ORDER, len(context)), 0, -1):
            if sums := self._sums.get(context[-order:]):
                tokens = np.array(sorted(sums), np.intp)
                return tokens, np.array([sums[token] for token in tokens.tolist()])
        return None


class NgramDistributions(DistributionSource):
    """The averages of a `TargetNgrams`, after the target's temperature and filters; penalties are left out.

    Args:
        table: what is known, which answers share.
    """

    source = Source.NGRAM

    def __init__(self, table: TargetNgrams) -> None:
        self._table: Final = table
        self._tail: Path = ()
        self._sampler = Sampler(_PLAIN, _KEPT)

    def start(self, params: SamplingParams) -> None:
        """Begin an answer for which the target is sampled with `params`."""
        filters = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        self._sampler = Sampler(replace(_PLAIN, **filters), _KEPT)

    def reset(self, token_ids: Sequence[int]) -> None:
        """Replace the sequence."""
        self._tail = tuple(token_ids[-_ORDER:])

    def append(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the sequence."""
        self._tail = (*self._tail, *token_ids)[-_ORDER:]

    def distribution(self, path: Path) -> Distribution | None:
        """The average distribution after the last tokens; None where they are new."""
        known = self._table.after((*self._tail, *path))
        if known is None:
            return None
        tokens, sums = known
        logits = np.full(_KEPT, _IMPOSSIBLE, np.float32)
        logits[: tokens.size] = np.log(np.maximum(sums, np.finfo(np.float64).tiny))
        sampled = Distribution.of(self._sampler, logits)
        kept = sampled.probs > 0
        return Distribution(tokens[sampled.ids[kept]], sampled.probs[kept])

    def learn(self, path: Path, logits: Logits) -> None:
        """Keep the target's most probable tokens."""
        self._table.learn((*self._tail, *path), logits)
