"""Several answers to one prompt, generated together, and the choice of the best.

The prompt is read once, by the first answer. Each other one begins with a copy of its KV cache, up to the last prefill
pass, which runs again: so each answer begins with the very logits that a single request with its seed has. They share
the passes that follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event
from typing import Final, Generic, TypeAlias, TypeVar

from ..decode import FinishReason
from ..kv.prefix_cache import CachedSequence
from ..options import GenerateOptions, Request
from ..overflow import Overflow
from ..result import AnswerCandidate, BestOf, Chunk, Stats
from ..sampling.logprobs import NO_LOGPROBS, LogprobTotals
from ..strategies.search import RankingSearch
from ..strategies.vote import by_vote
from .request_queue import Chunks, RequestQueue, Ticket, TurnTaker
from .request_run import Run
from .turn_lock import POLL_S

Item = TypeVar("Item")
Start: TypeAlias = Callable[[int, TurnTaker], Chunks]
"""Begins to generate the answer of an index."""

_LEAST_TOKENS: Final = 16
"""Number of tokens of an answer before which nothing is concluded from the variance of log-probabilities."""


def run_together(
    queue: RequestQueue,
    starts: Sequence[Callable[[TurnTaker], Generator[Item, None, None]]],
    takers: Sequence[TurnTaker],
    at_once: int,
    ready: Event | None = None,
) -> Generator[tuple[int, Item], None, None]:
    """Run generators that take turns in a thread each, so that they share passes; yield indices and items as they come.

    Args:
        queue: the queue of the engine. Where the caller has the turn, others get it while this waits for items.
        starts: begin the generators, which call `RequestQueue.yield_turn` before every pass.
        takers: who takes turns for each generator; those that run at a time wait for each other before a pass.
        at_once: number of generators that run at a time; the next one begins where one ends.
        ready: set when others than the first may begin; None if they may at once.
    """
    if ready is None:
        queue.expect(takers[:at_once])
    running = _Together(queue, starts, takers, ready)
    runs: list[Run[None]] = []
    try:
        for _ in starts[:at_once]:
            run: Run[None] = Run(running.work, "edge-run answer")
            run.start()
            runs.append(run)
        unfinished = len(runs)
        while unfinished:
            with queue.without_turn():
                result = running.next_result()
            if isinstance(result, BaseException):
                raise result
            if result is None:
                unfinished -= 1
            else:
                yield result
    finally:
        running.end()
        with queue.without_turn():
            for run in runs:
                run.join()
        for taker in takers:
            queue.leave(taker)


@dataclass(eq=False)
class _Together(Generic[Item]):
    """What the threads of `run_together` do; fields as there."""

    queue: RequestQueue
    starts: Sequence[Callable[[TurnTaker], Generator[Item, None, None]]]
    takers: Sequence[TurnTaker]
    ready: Event | None
    _results: SimpleQueue[tuple[int, Item] | BaseException | None] = field(default_factory=SimpleQueue)
    _ended: bool = False

    def __post_init__(self) -> None:
        self._waiting = iter(range(len(self.starts)))

    def next_result(self) -> tuple[int, Item] | BaseException | None:
        """Wait for an item, an error, or None for the end of a thread."""
        while True:  # waiting without end could not be interrupted on Windows
            with suppress(Empty):
                return self._results.get(timeout=POLL_S)

    def end(self) -> None:
        """Let the threads end after their current passes."""
        self._ended = True
        for taker in self.takers:
            taker.cancelled = True
        if self.ready is not None:
            self.ready.set()

    def work(self, _: Run[None]) -> None:
        """Run one generator after another in the calling thread."""
        try:
            index = next(self._waiting, None)
            while index is not None:
                if index and self.ready is not None:
                    self.ready.wait()
                if self._ended:
                    break
                self._run_one(index)
                following = next(self._waiting, None)
                if following is not None:
                    self.queue.expect((self.takers[following],))
                self.queue.leave(self.takers[index])
                index = following
        except BaseException as error:  # noqa: BLE001  raised in the thread that waits for items
            self.end()
            self._results.put(error)
        finally:
            self._results.put(None)

    def _run_one(self, index: int) -> None:
        """Run a generator, each item in a turn."""
        taker = self.takers[index]
        with self.queue.turn_of(taker):
            items = self.starts[index](taker)
        try:
            while True:
                with self.queue.turn_of(taker):
                    item = next(items, None)
                if item is None:
                    break
                self._results.put((index, item))
        finally:
            with self.queue.turn():
                items.close()


@dataclass(eq=False)
class PromptAnswers:
    """The answers to one prompt, which differ in their seeds."""

    queue: RequestQueue
    at_once: int
    """Number of answers that are generated at a time."""
    generate: Callable[[CachedSequence | None, Request, Callable[[], bool]], Chunks]
    """Generates an answer; see `LoadedModel.generate`."""
    forked: Callable[[CachedSequence, int], CachedSequence]
    """Makes a new sequence with a copy of the first slots of another."""
    request: Request
    """The prompt, and how many answers."""
    sequence: CachedSequence
    """The cache of the first answer, which reads the prompt."""
    ticket: Ticket
    """The request's entry in the queue."""

    def __post_init__(self) -> None:
        self._prompt: CachedSequence | None = None
        """A copy of the prompt's slots, from which all but the first answer begin."""
        self._is_read = Event()
        first, count = self.request.sampling.seed, self.request.options.candidates
        self.seeds = [(first + index) % (1 << 64) for index in range(count)]
        self._takers = [TurnTaker(steady=True) for _ in self.seeds]

    def chunks(self) -> Chunks:
        """Generate the answers that the request wants; every chunk says which one it belongs to."""
        request, sequence = self.request, self.sequence
        options = request.options
        with sequence.lent_to_prefixes(request.kept_tokens):
            if isinstance(request.search, RankingSearch):
                for index in range(options.n):
                    for chunk in self.generate(sequence, request, partial(self._is_cancelled, -1, self.ticket)):
                        yield replace(chunk, index=index)
            elif request.sampling.greedy and not options.branch:
                one = self.generate(sequence, request, partial(self._is_cancelled, -1, self.ticket))
                yield from repeated(one, options.n)
            elif options.ranked:
                most_tokens = options.max_tokens
                if request.overflow is Overflow.ERROR:
                    room = sequence.arena.limit - len(request.prompt_ids)
                    most_tokens = room if most_tokens is None else min(room, most_tokens)
                early_stop = None if options.votes else EarlyStop(options.n, options.early_stop, most_tokens)
                yield from best_of(self, options, early_stop)
            else:
                with closing(self.together(self.start)) as found:
                    for index, chunk in found:
                        yield replace(chunk, index=index)

    def together(self, start: Start) -> Generator[tuple[int, Chunk], None, None]:
        """Generate all answers, each begun by `start`; yields chunks and the indices of their answers as they come."""
        starts = [partial(start, index) for index in range(len(self.seeds))]
        return run_together(self.queue, starts, self._takers, self.at_once, self._is_read)

    def start(self, index: int, taker: TurnTaker) -> Chunks:
        """Generate the answer of an index."""
        request = self.request
        rank = index if request.options.branch else None
        seeded = replace(request, sampling=replace(request.sampling, seed=self.seeds[index]), rank=rank)
        sequence, prompt = self.sequence, self._prompt
        if index and prompt is not None:
            sequence = self.forked(prompt, prompt.arena.length)
        yield from self.generate(sequence, seeded, partial(self._is_cancelled, index, taker))
        self._copy_prompt()

    def _copy_prompt(self) -> None:
        if self._prompt is None:
            arena = self.sequence.arena
            self._prompt = self.forked(self.sequence, min(arena.last_prefill[0], arena.length))
            self.queue.expect(self._takers[1 : self.at_once])
            self._is_read.set()

    def _is_cancelled(self, index: int, taker: TurnTaker) -> bool:
        """Give up the turn before a pass of an answer, or of one that stands for all if its index is negative."""
        if not index and self.sequence.arena.length >= len(self.request.prompt_ids):
            self._copy_prompt()
        options = self.request.options
        mine = (index,) if not options.ranked and index >= 0 else range(options.n)
        ended = self.ticket.cancelled or not self.ticket.ended.isdisjoint(mine)
        return self.queue.yield_turn(taker) or ended


def repeated(generated: Chunks, count: int) -> Chunks:
    """Return one answer `count` times: without sampling, all answers are equal.

    The copies have the statistics of the one that was generated, so their sum is that of answers generated one by one.
    """
    chunks = []
    with closing(generated):
        for chunk in generated:
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


def best_of(answers: PromptAnswers, options: GenerateOptions, early_stop: EarlyStop | None) -> Chunks:
    """Generate answers, and return the chunks of the best when all have ended.

    The best have the largest mean log-probability of their tokens, of which an end-of-sequence token is one, or are
    elected `by_vote`. Of equal ones the first is better. A request that is cancelled returns the best answers so far,
    as cancelled ones.

    Args:
        answers: the answers.
        options: say how many to return, and whether answers vote.
        early_stop: decides which answers are stopped; None for none.
    """
    wanted = options.n
    found: dict[int, list[Chunk]] = {}

    def unless_stopped(index: int, taker: TurnTaker) -> Chunks:
        with closing(answers.start(index, taker)) as chunks:
            for chunk in chunks:
                yield chunk
                if early_stop is None:
                    continue
                if chunk.finish_reason is None and early_stop.stops(chunk.logprob_totals):
                    return
                if chunk.finish_reason not in (None, FinishReason.CANCELLED):
                    early_stop.add_finished(chunk.logprob_totals)

    with closing(answers.together(unless_stopped)) as generated:
        for index, chunk in generated:
            found.setdefault(index, []).append(chunk)
    # A cancelled request may not have begun them all.
    ends = {index: chunks[-1] for index, chunks in sorted(found.items()) if chunks[-1].completion_tokens}
    candidates = {
        index: AnswerCandidate(answers.seeds[index], end.completion_tokens, end.logprob_totals.mean, end.finish_reason)
        for index, end in ends.items()
    }
    cancelled = any(chunks[-1].finish_reason is FinishReason.CANCELLED for chunks in found.values())
    ended = [index for index, end in ends.items() if end.finish_reason is not None]
    # Of answers that were cut off, nobody knows how they would have ended.
    ended.sort(key=lambda index: (ends[index].finish_reason is FinishReason.CANCELLED, -candidates[index].mean_logprob))
    if options.votes:
        texts = {index: "".join(chunk.text for chunk in found[index]) for index in ended}
        votes = by_vote({i: (texts[i], ends[i].logprob_totals.total) for i in ended}, options.vote_by)
        ended = list(votes)
        candidates |= {index: replace(candidates[index], vote_logprob=votes[index]) for index in ended}
    best = ended[:wanted]
    for choice, index in enumerate(best):
        candidates[index] = replace(candidates[index], choice=choice)
    report = BestOf(tuple(candidates.values()), None if early_stop is None else early_stop.most_tokens)
    reading = ends[0].stats if 0 in ends else None
    for choice in range(wanted):
        *chosen, last = found[best[choice]] if choice < len(best) else (Chunk("", FinishReason.CANCELLED, Stats()),)
        for chunk in chosen:
            yield replace(chunk, index=choice)
        reason = FinishReason.CANCELLED if cancelled else last.finish_reason
        stats = last.stats
        if not choice and stats is not None:
            # The prompt was read for the first candidate, whichever is the best.
            stats = replace(stats, best_of=report, reused_tokens=0 if reading is None else reading.reused_tokens)
        yield replace(last, index=choice, finish_reason=reason, stats=stats)
