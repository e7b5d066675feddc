"""Several answers to one prompt, one after another over one KV cache, and the choice of the best.

After an answer the cache is rewound to the last prefill pass of the prompt. So nothing is copied, and each answer is,
to the last bit, the one that a single request with its seed gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from operator import itemgetter
from typing import Final, TypeAlias

from ..decode import FinishReason
from ..generation import CachedSequence
from ..options import Request
from ..overflow import Overflow
from ..result import AnswerCandidate, BestOf, Chunk, Stats
from ..sampling.logprobs import NO_LOGPROBS, LogprobTotals
from .answer_stream import IsCancelled
from .request_queue import Chunks

Generate: TypeAlias = Callable[[CachedSequence, Request, Callable[[], bool]], Chunks]
Start: TypeAlias = Callable[[int], Chunks]
"""Begins to generate the answer of an index, after the one before has ended."""

_LEAST_TOKENS: Final = 16
"""Number of tokens of an answer before which nothing is concluded from the variance of log-probabilities."""


def several(
    request: Request, sequence: CachedSequence, generate: Generate, cancelled: IsCancelled, context: int
) -> Chunks:
    """Generate several answers to a prompt, which differ in their seeds, over one KV cache.

    Args:
        request: the prompt, and how many answers.
        sequence: the cache.
        generate: begins to generate the answer to a request.
        cancelled: called before every pass with the answers that it is for.
        context: largest number of tokens of prompt and answer together.
    """
    options = request.options
    separate = not options.ranked and not request.sampling.greedy
    seeds = [(request.sampling.seed + index) % (1 << 64) for index in range(options.candidates)]

    def start(index: int) -> Chunks:
        if index:
            sequence.rewind_to_last_prefill()
        seeded = replace(request, sampling=replace(request.sampling, seed=seeds[index]))
        return generate(sequence, seeded, lambda: cancelled(*([index] if separate else range(options.n))))

    with sequence.lent_to_prefixes(request):
        if request.sampling.greedy:
            yield from repeated(start, options.n)
        elif options.ranked:
            most_tokens = options.max_tokens
            if request.overflow is Overflow.ERROR:
                room = context - len(request.prompt_ids)
                most_tokens = room if most_tokens is None else min(room, most_tokens)
            yield from best_of(start, seeds, options.n, EarlyStop(options.n, options.early_stop, most_tokens))
        else:
            yield from in_sequence(start, options.n)


def in_sequence(start: Start, count: int) -> Chunks:
    """Generate answers one after another; every chunk says which one it belongs to.

    Args:
        start: begins to generate an answer.
        count: number of answers.
    """
    for index in range(count):
        with closing(start(index)) as chunks:
            for chunk in chunks:
                yield replace(chunk, index=index)


def repeated(start: Start, count: int) -> Chunks:
    """Generate one answer and return it `count` times: without sampling, all answers are equal.

    The copies have the statistics of the one that was generated, so their sum is that of answers generated one by one.
    """
    chunks = []
    for chunk in in_sequence(start, 1):
        chunks.append(chunk)
        yield chunk
    for index in range(1, count):
        for chunk in chunks:
            yield replace(chunk, index=index)


class EarlyStop:
    """Decides whether an answer that is being generated will not be among the best.

    The answer to beat is the last of the best that have ended; B is its mean log-probability. An answer of t tokens
    whose log-probabilities add up to s has a deficit of D = tB - s. It is stopped in two cases:

    - It cannot be better any more. No log-probability is above 0, so with at most T tokens its mean is at most s / T.
    - With a confidence below 1: the probability that it makes up for its deficit is at most 1 - confidence, if, given
      what came before, the log-probability of each further token has a mean of at most B and a variance of at most v,
      that of all tokens seen so far, and if it has at most L further tokens. What the further tokens gain over B is
      then a supermartingale whose steps are at most -B, and the probability that it ever reaches D is at most
      exp(-D^2 / 2(Lv - BD/3)). L ends at twice the length of the longest answer so far, or at T.

    Source: Freedman, "On tail probabilities for martingales" (1975), theorem 1.6, for the bound. Sun et al., "Fast
    best-of-N decoding via speculative rejection" (2024) stop answers by the rank of a partial score.

    Args:
        wanted: number of answers to return.
        confidence: see `GenerateOptions.early_stop`.
        most_tokens: largest number of tokens of an answer, T; None for no limit.
    """

    def __init__(self, wanted: int, confidence: float, most_tokens: int | None) -> None:
        self.most_tokens: Final = most_tokens
        self._wanted: Final = wanted
        self._confidence: Final = confidence
        self._means: list[float] = []
        self._seen = NO_LOGPROBS
        self._longest = 0

    def add_finished(self, totals: LogprobTotals) -> None:
        """Take an answer that has come to its end into account."""
        self._means.append(totals.mean)
        self._seen = self._seen.joined(totals)
        self._longest = max(self._longest, totals.tokens)

    def stops(self, totals: LogprobTotals) -> bool:
        """Whether to stop an answer whose tokens so far have these log-probabilities."""
        if len(self._means) < self._wanted or not totals.tokens:
            return False
        to_beat = sorted(self._means, reverse=True)[self._wanted - 1]
        if self.most_tokens is not None and totals.total < to_beat * self.most_tokens:
            return True
        deficit = totals.tokens * to_beat - totals.total
        if self._confidence == 1 or totals.tokens < _LEAST_TOKENS or deficit <= 0:
            return False
        end = 2 * self._longest if self.most_tokens is None else min(2 * self._longest, self.most_tokens)
        variance = self._seen.joined(totals).variance
        spread = max(end - totals.tokens, 0) * variance - to_beat * deficit / 3
        return deficit * deficit >= -2 * math.log1p(-self._confidence) * spread


def best_of(start: Start, seeds: Sequence[int], wanted: int, early_stop: EarlyStop) -> Chunks:
    """Generate answers one after another, and return the chunks of the best when all have ended.

    The best have the largest mean log-probability of their tokens, of which an end-of-sequence token is one. Of equal
    ones the first is better. A request that is cancelled returns the best answers so far, as cancelled ones.

    Args:
        start: begins to generate an answer.
        seeds: the seed of each answer.
        wanted: number of answers to return.
        early_stop: decides which answers are stopped.
    """
    best: list[tuple[float, int, list[Chunk]]] = []
    """Negative mean log-probability, index and chunks of each."""
    candidates: list[AnswerCandidate] = []
    reading = Stats()
    cancelled = False
    for index, seed in enumerate(seeds):
        chunks: list[Chunk] = []
        stopped = False
        with closing(start(index)) as running:
            for chunk in running:
                chunks.append(chunk)
                stopped = chunk.finish_reason is None and early_stop.stops(chunk.logprob_totals)
                if stopped:
                    break
        last = chunks[-1]
        if not index and last.stats is not None:
            reading = last.stats
        mean = last.logprob_totals.mean
        candidates.append(AnswerCandidate(seed, last.completion_tokens, mean, last.finish_reason))
        if stopped:
            continue
        cancelled = last.finish_reason is FinishReason.CANCELLED
        if not cancelled:
            early_stop.add_finished(last.logprob_totals)
        if not cancelled or len(best) < wanted:
            best.append((-mean, index, chunks))
            best.sort(key=itemgetter(0))
            del best[wanted:]
        if cancelled:
            break
    for choice, (_, index, _) in enumerate(best):
        candidates[index] = replace(candidates[index], choice=choice)
    report = BestOf(tuple(candidates), early_stop.most_tokens)
    for choice in range(wanted):
        *chosen, last = best[choice][2] if choice < len(best) else (Chunk("", FinishReason.CANCELLED, Stats()),)
        for chunk in chosen:
            yield replace(chunk, index=choice)
        reason = FinishReason.CANCELLED if cancelled else last.finish_reason
        stats = last.stats
        if not choice and stats is not None:
            # The prompt was read for the first candidate, whichever is the best.
            stats = replace(stats, best_of=report, reused_tokens=reading.reused_tokens)
        yield replace(last, index=choice, finish_reason=reason, stats=stats)
