"""One answer: prompt ids through the decode loop, tokens into text, stop strings, and the account of it all."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from .decode import DecodeLimits, FinishReason, decode
from .graph.bound_session import BoundSession
from .result import Chunk, RoundTally, Stats
from .sampling import Sampler, SamplingParams
from .speculation.near_ties import NearTies
from .speculation.replay import ReplaySampler
from .speculation.speculator import Speculator
from .speculation.verification import TokenSampler
from .text.detokenizer import StreamDecoder
from .text.stop_sequences import StopMatcher
from .text.tokenizer import TextTokenizer


@dataclass
class CachedSequence:
    """A bound arena and the tokens its rows were computed from; there are never fewer tokens than rows."""

    bound: BoundSession
    tokens: list[int] = field(default_factory=list)

    def continue_with(self, prompt: Sequence[int]) -> int:
        """Make `prompt` the text, keeping the rows of the common beginning; returns how many were kept."""
        arena = self.bound.arena
        kept = 0
        for old, new in zip(self.tokens[: arena.length], prompt, strict=False):
            if old != new:
                break
            kept += 1
        arena.rewind_to(kept)
        self.tokens = list(prompt)
        return kept


def complete(
    text: CachedSequence,
    prompt: Sequence[int],
    tokenizer: TextTokenizer,
    sampling: SamplingParams,
    limits: DecodeLimits,
    stops: Sequence[str],
    cancelled: Callable[[], bool],
    speculator: Speculator | None = None,
    *,
    answer: Sequence[int] | None = None,
    epsilon: float | None = None,
    keep_rounds: bool = False,
) -> Generator[Chunk, None, None]:
    """Answer `prompt` and yield text as it becomes certain; the last chunk has the finish reason and the stats.

    `text` follows along round by round, so that closing this iterator at any point leaves a cache to continue from.
    With a recorded `answer`, its tokens are given instead of the model's own, at the cost of the model's. With
    `epsilon`, choices between scores that near are decided again where that is needed for plain decoding's text.

    Raises:
        ContextError: the prompt leaves no room for an answer.
    """
    started = time.perf_counter()
    first_token: float | None = None
    completion = passes = decode_passes = 0
    reused = text.continue_with(prompt)
    decoder = StreamDecoder(tokenizer)
    matcher = StopMatcher(stops)
    finish = FinishReason.LENGTH
    sampler = Sampler(sampling, text.bound.graph_io.vocab_size)
    chooser: TokenSampler = sampler if answer is None else ReplaySampler(answer, len(prompt), sampler)
    near_ties = None if epsilon is None else NearTies(text.bound, sampler, epsilon, cancelled)
    tally = RoundTally()
    with closing(decode(text.bound, prompt, chooser, limits, cancelled, speculator, near_ties)) as steps:
        for step in steps:
            passes += step.target_passes
            decode_passes += step.target_passes if first_token is not None else 0
            if first_token is None:
                first_token = time.perf_counter()
            tally.add(step)
            text.tokens.extend(step.tokens)
            produced, shown = step.produced, ""
            for number, token in enumerate(step.tokens, 1):
                shown += matcher.push(decoder.push((token,)))
                if matcher.stopped:  # what the round emitted beyond is no part of the answer
                    produced = number
                    break
            completion += produced
            if matcher.stopped:
                finish = FinishReason.STOP
            elif step.finish is not None:
                finish = step.finish
            if shown:
                yield Chunk(shown)
            if matcher.stopped:
                break
    rest = matcher.push(decoder.flush()) + matcher.flush()
    ended = time.perf_counter()
    tally.count()
    stats = Stats(
        prompt_tokens=len(prompt),
        reused_tokens=min(reused, len(prompt) - 1),
        completion_tokens=completion,
        target_passes=passes,
        decode_passes=decode_passes,
        first_token_s=(first_token or ended) - started,
        total_s=ended - started,
        drafted=tally.drafted,
        accepted=tally.accepted,
        by_source=tally.by_source(),
        by_depth=tally.by_depth(),
        draft_s=tally.draft_s,
        target_s=tally.target_s,
        host_s=tally.host_s,
        rounds=tally.rounds if keep_rounds else (),
    )
    yield Chunk(rest, finish, stats)
