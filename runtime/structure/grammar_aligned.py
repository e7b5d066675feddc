"""Grammar-aligned sampling: answers of the model's own distribution, on condition that they follow the grammar.

Renormalizing every token's probabilities over what the grammar allows favours beginnings that are probable themselves
and seldom lead to an answer of the grammar. Adaptive sampling with approximate expected futures (ASAp, Park et al.
2024) multiplies the probability of every token by what earlier samples have shown of the probability that the text goes
on as the grammar allows. The more samples, the closer to the conditional distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from ..options import Request
from ..result import Chunk, Stats
from ..sampling.logit_stage import Logits
from ..sampling.sampler import Sampler, SamplingParams, require_finite
from ..sampling.token_mask import DeadEndError, TokenConstraint
from .expected_futures import ExpectedFutures


class AlignedSampler(Sampler):
    """A `Sampler` whose probabilities are weighed with expected futures.

    Args:
        params: how tokens are chosen: a temperature, and no filters.
        vocab_size: number of logits.
        constraint: the grammar.
        futures: what earlier samples have shown; updated.
    """

    def __init__(
        self, params: SamplingParams, vocab_size: int, constraint: TokenConstraint, futures: ExpectedFutures
    ) -> None:
        super().__init__(params, vocab_size, constraint)
        self._futures: Final = futures
        self._own = np.empty(vocab_size, np.float64)
        """The model's probabilities at the latest position."""

    def observe(self, tokens: npt.ArrayLike) -> None:
        """Add tokens of the answer to the sequence."""
        super().observe(tokens)
        self._futures.observe(np.asarray(tokens, np.intp).ravel().tolist())

    def choose(self, logits: Logits, position: int) -> int:
        """Choose a token, and note its probability under the model."""
        token = super().choose(logits, position)
        self._futures.chosen(token, float(self._own[token]))
        return token

    def _possible(self, logits: Logits) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
        """The tokens that may come, and their weighed probabilities."""
        own = self._own
        scores = self._adjusted(logits)
        largest = scores.max()
        require_finite(float(largest))
        np.subtract(scores, largest, out=own)
        own /= self.params.temperature
        np.exp(own, out=own)
        own /= own.sum()
        try:
            mask = self._mask_here()
        except DeadEndError:
            self._futures.dead_end()
            raise
        ids = self._ids if mask is None else mask.every
        probabilities = own[ids]
        self._futures.weigh(ids, probabilities)
        total = probabilities.sum()
        if not total > 0:
            self._futures.dead_end()
            raise DeadEndError("no answer of the grammar is possible after what was sampled", "sample again")
        return ids, probabilities / total


def generate_aligned(
    generate: Callable[..., Generator[Chunk, None, None]], request: Request
) -> Generator[Chunk, None, None]:
    """Generate several answers one after the other, each from what the earlier ones have shown, and give the last.

    Args:
        generate: generates the answer to a request; with `last=True`, in the sequence of the conversation.
        request: the answer to generate, and the number of samples, which have its seed and the next ones.

    Yields:
        The chunks of the last answer; its statistics cover all answers.

    Raises:
        DeadEndError: the last answer cannot be completed.
    """
    futures = ExpectedFutures()
    total: Stats | None = None
    for index in range(request.options.grammar_aligned):
        sampling = replace(request.sampling, seed=(request.sampling.seed + index) % (1 << 64))
        last = index == request.options.grammar_aligned - 1
        try:
            for chunk in generate(replace(request, sampling=sampling, futures=futures), last=last):
                if chunk.stats is not None:
                    total = chunk.stats if total is None else total + chunk.stats
                if last:
                    yield chunk if chunk.stats is None else replace(chunk, stats=total)
        except DeadEndError:
            if last:
                raise
        finally:
            futures.finish()
