"""Generates one answer: runs the decode loop, turns tokens into text, and finds stop sequences."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from ..models.progress import Progress, silent
from .decode import DecodeLimits, FinishReason, Step, decode
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
    def lent_to_prefixes(self) -> Iterator[None]:
        """Let other sequences copy from a single answer's cache during the block, and hand it on afterwards."""
        prefixes = self.prefixes
        if prefixes is None:
            yield
            return
        prefixes.watch(self)
        try:
            yield
        finally:
            prefixes.unwatch(self)
            prefixes.keep(self.arena, self.token_ids)

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


class Generation:
    """Generates one answer.

    Args:
        sequence: the cache to generate in. It is updated round by round, so that leaving `generate` at any point leaves
            a sequence to continue from.
        request: the prompt and how to answer it. With a recording, its tokens are given instead of the model's own, at
            the cost of the model's.
        tokenizer: the model's.
        drafters: the model's.
        cancelled: called before every pass; True ends the answer.
    """

    def __init__(
        self,
        sequence: CachedSequence,
        request: GenerationRequest,
        tokenizer: TextTokenizer,
        drafters: DrafterPool,
        cancelled: Callable[[], bool],
    ) -> None:
        self._recorder = StatsRecorder(len(request.prompt_ids))
        self._sequence = sequence
        self._request = request
        self._tokenizer = tokenizer
        self._drafters = drafters
        self._cancelled = cancelled
        self._sampler = Sampler(request.sampling, sequence.bound.graph_io.vocab_size)
        self._measured_before = drafters.measuring.seconds
        self._kept = 0
        """Number of tokens of the prompt whose slots were in the cache."""

    def generate(self) -> Generator[Chunk, None, None]:
        """Answer; yield text as soon as later tokens cannot change it.

        Yields:
            Pieces of text; the last chunk has the finish reason and the statistics.

        Raises:
            ContextError: the prompt leaves no room for an answer.
            InputError: a drafter that was asked for is not available.
        """
        sequence, request, tokenizer, recorder = self._sequence, self._request, self._tokenizer, self._recorder
        start = request.start
        decoder = StreamDecoder(tokenizer) if start is None else start.decoder()
        matcher = StopMatcher(request.stop_sequences, "" if start is None else start.text)
        tokens = None if request.logprobs is None else AnswerTokens(tokenizer.token_bytes, decoder.held)
        finish = FinishReason.LENGTH
        with sequence.lent_to_prefixes(), self._drafters.answering(request, sequence.arena) as speculator:
            steps = self._decode(speculator)
            with closing(steps):
                for step in steps:
                    recorder.add(step)
                    sequence.token_ids.extend(step.tokens)
                    produced, text = step.produced, ""
                    for count, token in enumerate(step.tokens, 1):
                        decoded = decoder.push((token,))
                        text += matcher.push(decoded)
                        if tokens is not None:
                            tokens.add(step.logprobs[count - 1], decoded, step.origins[count - 1])
                        if matcher.stopped:  # tokens after a stop sequence do not belong to the answer
                            produced = count
                            break
                    recorder.completion_tokens += produced
                    if matcher.stopped:
                        finish = FinishReason.STOP
                    elif step.finish is not None:
                        finish = step.finish
                    if text:
                        listed = () if tokens is None else tokens.take(text)
                        yield Chunk(text, logprobs=listed, completion_tokens=recorder.completion_tokens)
                    if matcher.stopped:
                        break
            decoded = decoder.flush()
            remainder = matcher.push(decoded) + matcher.flush()
            rest = () if tokens is None else tokens.finish(decoded, remainder)
            stats = recorder.stats(keep_rounds=request.keep_rounds)
            self._drafters.store_conversation(sequence.token_ids[self._kept :])
        yield Chunk(remainder, finish, stats, rest, completion_tokens=recorder.completion_tokens)

    def _decode(self, speculator: Speculator | None) -> Generator[Step, None, None]:
        """Begin to decode the sequence, which is the request's prompt from now on."""
        sequence, request, sampler, recorder = self._sequence, self._request, self._sampler, self._recorder
        prompt_ids = request.prompt_ids
        near_ties = None
        if request.exact and request.recording is None:
            speculator, near_ties = self._exact_verification(speculator)
        recorder.record_setup(measuring_s=self._drafters.measuring.seconds - self._measured_before)
        self._kept = sequence.continue_with(prompt_ids)
        # The last token of a prompt always runs again.
        recorder.reused_tokens = min(self._kept, len(prompt_ids) - 1)
        token_sampler: TokenSampler = sampler
        eos = frozenset[int]() if request.ignore_eos else self._tokenizer.eos
        if request.recording is not None:
            token_sampler = ReplaySampler(request.recording.answer, len(prompt_ids), sampler)
            eos = frozenset()  # a recording may hold any token, and ends where it ends
        limits = DecodeLimits(request.max_tokens, eos, self._cancelled, sequence.progress)
        vocab_size = sequence.bound.graph_io.vocab_size
        log_softmax = None if request.logprobs is None else LogSoftmax(request.logprobs, vocab_size)
        answer_length = 0 if request.start is None else len(request.start.token_ids)
        return decode(
            sequence.bound,
            prompt_ids,
            token_sampler,
            limits,
            speculator,
            near_ties,
            log_softmax,
            answer_length=answer_length,
        )

    def _exact_verification(self, speculator: Speculator | None) -> tuple[Speculator | None, NearTies]:
        """The speculator if an exact answer can be verified, else None, and what recomputes near ties."""
        epsilon = 0.0
        if speculator is not None and self._request.sampling.greedy:
            report = self._drafters.exactness_report(self._tokenizer.encode(SAMPLE_TEXT, add_special_tokens=True))
            epsilon = report.epsilon
            speculator = speculator if report.noise.sound else None
        else:
            speculator = None
        epsilon = epsilon if speculator is not None else 0.0
        return speculator, NearTies(self._sequence.bound, self._sampler, epsilon, self._cancelled)
