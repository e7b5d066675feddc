"""Generates one answer: runs the decode loop, turns tokens into text, and finds stop sequences."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from ..models.progress import Progress, silent
from .decode import DecodeLimits, FinishReason, decode
from .graph.bound_session import BoundSession
from .kv.arena import KVArena
from .kv.prefix_cache import PrefixCache
from .measure.exactness import SAMPLE_TEXT
from .options import GenerationRequest
from .result import Chunk, StatsRecorder
from .sampling.logprobs import LogSoftmax
from .sampling.sampler import Sampler
from .speculation.near_ties import NearTies
from .speculation.pool import DrafterPool
from .speculation.replay import ReplaySampler
from .speculation.speculator import Speculator
from .speculation.verification import TokenSampler
from .text.detokenizer import StreamDecoder
from .text.stop_sequences import StopMatcher
from .text.tokenizer import TextTokenizer
from .token_logprobs import AnswerTokens


@dataclass(eq=False)
class CachedSequence:
    """A token sequence and its KV cache, which never has more slots than there are tokens."""

    bound: BoundSession
    token_ids: list[int] = field(default_factory=list)
    """Tokens whose slots are in the cache, and those after them that have not run yet."""
    progress: Progress = silent
    """Receives the progress of reading long prompts."""
    prefixes: PrefixCache | None = None
    """Receives the KV cache after one answer; None for a conversation, which keeps its own."""

    @property
    def arena(self) -> KVArena:
        """The KV cache."""
        return self.bound.arena

    @contextmanager
    def kept_after_answer(self) -> Iterator[None]:
        """Hand the cache on when the block ends, if the sequence is that of a single answer."""
        try:
            yield
        finally:
            if self.prefixes is not None:
                self.prefixes.keep(self.arena, self.token_ids)

    def continue_with(self, prompt_ids: Sequence[int]) -> int:
        """Replace the sequence by `prompt_ids`; keep and count the cached slots of their common prefix."""
        arena = self.arena
        kept = 0
        for old, new in zip(self.token_ids[: arena.length], prompt_ids, strict=False):
            if old != new:
                break
            kept += 1
        arena.rewind_to(kept)
        self.token_ids = list(prompt_ids)
        return kept


def generate(
    sequence: CachedSequence,
    request: GenerationRequest,
    tokenizer: TextTokenizer,
    drafters: DrafterPool,
    cancelled: Callable[[], bool],
) -> Generator[Chunk, None, None]:
    """Answer a request; yield text as soon as later tokens cannot change it.

    Args:
        sequence: the cache to generate in. It is updated round by round, so that closing this generator at any point
            leaves a sequence to continue from.
        request: the prompt and how to answer it. With a recording, its tokens are given instead of the model's own, at
            the cost of the model's.
        tokenizer: the model's.
        drafters: the model's.
        cancelled: called before every pass; True ends the answer.

    Yields:
        Pieces of text; the last chunk has the finish reason and the statistics.

    Raises:
        ContextError: the prompt leaves no room for an answer.
        InputError: a drafter that was asked for is not available.
    """
    prompt_ids, bound = request.prompt_ids, sequence.bound
    recorder = StatsRecorder(len(prompt_ids))
    sampler = Sampler(request.sampling, bound.graph_io.vocab_size)
    measured_before = drafters.measuring.seconds
    speculator, near_ties = _speculation(request, sampler, sequence, tokenizer, drafters, cancelled)
    recorder.record_setup(measuring_s=drafters.measuring.seconds - measured_before)
    token_sampler: TokenSampler = sampler
    eos = frozenset[int]() if request.ignore_eos else tokenizer.eos
    if request.recording is not None:
        token_sampler = ReplaySampler(request.recording.answer, len(prompt_ids), sampler)
        eos = frozenset()  # a recording may hold any token, and ends where it ends
    limits = DecodeLimits(request.max_tokens, eos, cancelled, sequence.progress)
    kept = sequence.continue_with(prompt_ids)
    # The last token of a prompt always runs again.
    recorder.reused_tokens = min(kept, len(prompt_ids) - 1)
    decoder = StreamDecoder(tokenizer)
    matcher = StopMatcher(request.stop_sequences)
    finish = FinishReason.LENGTH
    log_softmax = None if request.logprobs is None else LogSoftmax(request.logprobs, bound.graph_io.vocab_size)
    tokens = None if request.logprobs is None else AnswerTokens(tokenizer.token_bytes)
    steps = decode(bound, prompt_ids, token_sampler, limits, speculator, near_ties, log_softmax)
    with drafters.generating(), sequence.kept_after_answer(), closing(steps):
        for step in steps:
            recorder.add(step)
            sequence.token_ids.extend(step.tokens)
            produced, text = step.produced, ""
            for count, token in enumerate(step.tokens, 1):
                decoded = decoder.push((token,))
                text += matcher.push(decoded)
                if tokens is not None:
                    tokens.add(step.logprobs[count - 1], decoded)
                if matcher.stopped:  # tokens after a stop sequence do not belong to the answer
                    produced = count
                    break
            recorder.completion_tokens += produced
            if matcher.stopped:
                finish = FinishReason.STOP
            elif step.finish is not None:
                finish = step.finish
            if text:
                yield Chunk(text, logprobs=() if tokens is None else tokens.take(text))
            if matcher.stopped:
                break
    decoded = decoder.flush()
    remainder = matcher.push(decoded) + matcher.flush()
    rest = () if tokens is None else tokens.finish(decoded, remainder)
    stats = recorder.stats(keep_rounds=request.keep_rounds)
    drafters.end_answer()
    drafters.store_conversation(sequence.token_ids[kept:])
    yield Chunk(remainder, finish, stats, rest)


def _speculation(
    request: GenerationRequest,
    sampler: Sampler,
    sequence: CachedSequence,
    tokenizer: TextTokenizer,
    drafters: DrafterPool,
    cancelled: Callable[[], bool],
) -> tuple[Speculator | None, NearTies | None]:
    """The speculator of an answer, and what recomputes its near ties if it is to be exact.

    Where an exact answer cannot be verified, it is decoded plainly.
    """
    speculator = drafters.speculator(request, sequence.bound.arena)
    if not request.exact or request.recording is not None:
        return speculator, None
    epsilon = 0.0
    if speculator is not None and request.sampling.greedy:
        report = drafters.exactness_report(tokenizer.encode(SAMPLE_TEXT, add_special_tokens=True))
        epsilon = report.epsilon
        speculator = speculator if report.noise.sound else None
    else:
        speculator = None
    return speculator, NearTies(sequence.bound, sampler, epsilon if speculator is not None else 0.0, cancelled)
