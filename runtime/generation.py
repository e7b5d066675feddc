"""Generates one answer: runs the decode loop, turns tokens into text, and finds stop sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ..errors import ContextError, TemplateError
from .blocks.block_decode import BlockChoices, block_decode
from .decode import DecodeLimits, FinishReason, Step, decode
from .graph.cache_shift import CacheShift
from .graph.graph_io import GraphIO
from .kv.prefix_cache import CachedSequence
from .measure.exactness import SAMPLE_TEXT
from .options import Request
from .overflow import Overflow, kept_first, trimmed, window
from .result import Chunk, StatsRecorder
from .sampling.logit_stage import FirstToken, LogitStage
from .sampling.logprobs import LogSoftmax
from .sampling.sampler import Sampler, SamplingParams
from .speculation.pool import DrafterPool
from .speculation.replay import ReplaySampler
from .speculation.sampled_speculator import SampledSpeculator
from .speculation.speculator import Speculator
from .speculation.verification import NearTies
from .strategies.lossy import LossyRule, LossySampler
from .strategies.search import search_steps
from .strategies.second_reader import SecondReader, followed
from .text.detokenizer import StopMatcher, StreamDecoder
from .text.infill import InfillTokens
from .text.token_logprobs import AnswerTokens
from .text.tokenizer import TextTokenizer

if TYPE_CHECKING:  # llguidance is an extra
    from .structure.grammar_state import GrammarState


@dataclass(eq=False)
class Generation:
    """Generates one answer."""

    sequence: CachedSequence
    """The cache to generate in. It is updated round by round, so that leaving `generate` at any point leaves a sequence
    to continue from."""
    request: Request
    """The prompt and how to answer it. With a recording, its tokens are given instead of the model's own, at the cost
    of the model's."""
    tokenizer: TextTokenizer
    drafters: DrafterPool
    shift: CacheShift
    """Drops slots of the model's caches, for answers that outgrow the context."""
    cancelled: Callable[[], bool]
    """Called before every pass; True ends the answer. Other requests may run passes inside the call."""
    readers: Sequence[SecondReader] = ()
    """The second readers of the request's strategies, in their order."""

    def __post_init__(self) -> None:
        request = self.request
        self._recorder = StatsRecorder(len(request.prompt_ids), request.images.merged_tokens if request.images else 0)
        self._sequences = [self.sequence, *(reader.sequence for reader in self.readers)]
        self._chat = request.chat
        self._speculator: Speculator | None = None
        self._constraint: GrammarState | None = None
        """Where the answer is in its grammar."""
        self._epsilon: float | None = None
        """Largest difference of a near tie; None for an answer that is not exact. With 0, for an exact one without
        drafts, only slots that earlier answers left in the cache, and that are not plain decoding's, are recomputed."""
        self._start_ids = () if request.start is None else tuple(request.start.token_ids)
        self._prompt_length = len(request.prompt_ids) - len(self._start_ids)
        """Number of tokens of the sequence that are not the answer's."""
        self._answer_ids: list[int] = list(self._start_ids)
        """The tokens of the answer, also those that a window has left out."""
        least = request.options.least_confidence
        self._least_mean = math.log(least) if least else -math.inf
        """Mean log-probability of its tokens below which the answer ends."""
        self._measured_before = self.drafters.measuring.seconds
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
        sequence, request, tokenizer, recorder = self.sequence, self.request, self.tokenizer, self._recorder
        start, reading = request.start, request.reading
        parser, marks = (None, None) if reading is None else (reading.begin()[0], reading.marks)
        decoder = StreamDecoder(tokenizer, marks) if start is None else start.decoder(marks)
        matcher = StopMatcher(request.options.stops, "" if start is None else start.text)
        tokens = None if request.options.logprobs is None else AnswerTokens(tokenizer.token_bytes, decoder.held)
        finish = FinishReason.LENGTH
        with ExitStack() as stack:
            for each in self._sequences:
                stack.enter_context(each.lent_to_prefixes(request.kept_tokens))
            speculator = stack.enter_context(self.drafters.answering(request, sequence.arena))
            stack.callback(self.close)
            steps: Generator[Step, None, None] | None = self._decode(speculator)
            while steps is not None:
                with closing(steps):
                    for step in steps:
                        recorder.add(step)
                        sequence.token_ids.extend(step.tokens)
                        self._answer_ids.extend(step.tokens)
                        text = self._text_of(step, decoder, matcher, tokens)
                        if matcher.stopped:
                            finish = FinishReason.STOP
                        elif step.finish is not None:
                            finish = step.finish
                        if text:
                            listed = () if tokens is None else tokens.take(text)
                            chunk = Chunk(
                                text,
                                logprobs=listed,
                                completion_tokens=recorder.completion_tokens,
                                logprob_totals=recorder.logprob_totals,
                            )
                            chunk = chunk if parser is None else chunk.with_parts(parser.push(text))
                            yield chunk
                            if chunk.tool_calls and reading is not None and not reading.several:
                                matcher.stop()
                                finish = FinishReason.STOP
                        if matcher.stopped:
                            break
                steps = self._go_on() if finish is FinishReason.LENGTH and not matcher.stopped else None
            decoded = decoder.flush()
            remainder = matcher.push(decoded) + matcher.flush()
            rest = () if tokens is None else tokens.finish(decoded, remainder)
            stats = recorder.stats(keep_rounds=request.options.explain, stop_sequence=matcher.found)
            self.drafters.store_conversation(sequence.token_ids[self._kept :])
        completed, totals = recorder.completion_tokens, recorder.logprob_totals
        last = Chunk(remainder, finish, stats, rest, completion_tokens=completed, logprob_totals=totals)
        yield last if parser is None else last.with_parts(parser.push(remainder), parser.finish())

    def _text_of(self, step: Step, decoder: StreamDecoder, matcher: StopMatcher, tokens: AnswerTokens | None) -> str:
        """The text that a step adds; tokens after the end of the answer's text do not belong to it, nor count."""
        produced, text, count = step.produced, "", 0
        totals = self._recorder.logprob_totals
        for count, token in enumerate(step.tokens, 1):
            if step.logprobs:
                totals = totals.plus(each.logprob for each in step.logprobs[count - 1 : count])
            if totals.tokens and totals.mean < self._least_mean:
                matcher.end()
            else:
                decoded = decoder.push((token,))
                text += matcher.push(decoded)
                if tokens is not None:
                    tokens.add(step.logprobs[count - 1], decoded, step.origins[count - 1])
            if matcher.stopped:
                produced = count
                break
        self._recorder.completion_tokens += produced
        self._recorder.text_tokens += min(produced, len(step.tokens))
        if step.logprobs:
            self._recorder.logprob_totals = totals.plus(each.logprob for each in step.logprobs[count:produced])
        return text

    def close(self) -> None:
        """Give back what the answer's grammar uses, and let go of the caches."""
        for sequence in self._sequences:
            sequence.bound.release_shared()
        if self._constraint is not None:
            self._constraint.end()

    def _decode(self, speculator: Speculator | None) -> Generator[Step, None, None]:
        """Begin to decode the sequence, which is the request's prompt from now on."""
        request, recorder = self.request, self._recorder
        if request.options.exact and request.recording is None:
            # An exact answer is decoded plainly where the noise of wide passes has no sound bound.
            exact_speculator: Speculator | None = None
            self._epsilon = 0.0
            if speculator is not None and request.sampling.greedy:
                report = self.drafters.exactness_report(self.tokenizer.encode(SAMPLE_TEXT, add_special_tokens=True))
                if report.noise.sound:
                    exact_speculator, self._epsilon = speculator, report.epsilon
            speculator = exact_speculator
        self._speculator = speculator
        # Further graphs, and packed ones, give no hidden states.
        alone = request.options.exact or (request.search is not None and request.search.reads_states)
        self.sequence.bound.prefers_base, self.sequence.bound.shares_passes = alone, not alone
        recorder.record_setup(measuring_s=self.drafters.measuring.seconds - self._measured_before)
        self._kept = self.sequence.continue_with(request.prompt_ids, request.images)
        # The last token of a prompt always runs again.
        recorder.reused_tokens = min(self._kept, len(request.prompt_ids) - 1)
        return self._decode_once(request.sampling, request.options.max_tokens)

    def _go_on(self) -> Generator[Step, None, None] | None:
        """Make room in the full context and go on to decode; None if the answer ends here."""
        request, recorder = self.request, self._recorder
        left = None if request.options.max_tokens is None else request.options.max_tokens - recorder.completion_tokens
        blocks = self.sequence.bound.graph_io.blocks
        special = (request.images, request.recording, request.search, self.readers or None, blocks)
        cannot = any(each is not None for each in special)
        ends = request.overflow is Overflow.ERROR or cannot or left == 0
        if ends or not self._make_room(left):
            return None
        recorder.context_shifts += 1
        generated = len(self._answer_ids) - len(self._start_ids)
        left_out = len(request.prompt_ids) + generated - len(self.sequence.token_ids)
        sampling = replace(request.sampling, first_position=left_out)
        if isinstance(self._speculator, SampledSpeculator):
            self._speculator.start_answer(sampling)
        return self._decode_once(sampling, left)

    def _decode_once(self, sampling: SamplingParams, max_tokens: int | None) -> Generator[Step, None, None]:
        """Continue the sequence up to the end of the context."""
        sequence, request, speculator = self.sequence, self.request, self._speculator
        bound, token_ids = sequence.bound, list(sequence.token_ids)
        answer_length = len(token_ids) - self._prompt_length
        vocab_size = bound.graph_io.vocab_size
        sampler = self._sampler(sampling, vocab_size, answer_length)
        bound.whole_logits = _needs_whole_logits(request, speculator, bound.graph_io)
        choices = BlockChoices.of(request.options, bound.graph_io, self.tokenizer, self.readers)
        if choices is None:
            bound = followed(bound, sampler.stages, self.readers)
        near_ties = None if self._epsilon is None else NearTies(bound, sampler, self._epsilon, self.cancelled)
        eos = frozenset[int]() if request.options.ignore_eos else self.tokenizer.eos
        if eos and request.options.suffix is not None:
            eos |= InfillTokens.of(self.tokenizer).ends
        if request.recording is not None:
            eos = frozenset()  # a recording may hold any token, and ends where it ends
        limits = DecodeLimits(max_tokens, eos, self.cancelled, sequence.progress)
        log_softmax = LogSoftmax(request.options.logprobs or 0, vocab_size) if request.needs_logprobs else None
        if choices is not None:
            return block_decode(bound, token_ids, sampler, limits, choices, log_softmax, answer_length=answer_length)
        if request.search is not None:
            steps = partial(search_steps, request.search, bound, token_ids, sampler, limits, log_softmax)
            return steps(self._constraint, answer_length=answer_length)
        return decode(
            bound,
            token_ids,
            sampler,
            limits,
            speculator,
            near_ties,
            log_softmax,
            self._constraint,
            answer_length=answer_length,
        )

    def _sampler(self, sampling: SamplingParams, vocab_size: int, answer_length: int) -> Sampler:
        """The sampler of an answer whose last `answer_length` tokens it is given to observe."""
        if self._constraint is not None:
            self._constraint.end()
        request = self.request
        earlier = self._answer_ids[: len(self._answer_ids) - answer_length]
        if request.grammar is not None:
            self._constraint = request.grammar.start(earlier)
        stages: list[LogitStage] = [
            each.start(sampling, vocab_size, self.tokenizer)
            for each in request.options.strategies
            if self.sequence.bound.graph_io.blocks is None  # there they compare logits before the sampler
        ]
        for stage in stages:
            stage.earlier = earlier
        if request.rank is not None and len(self._answer_ids) == len(self._start_ids):
            stages.append(FirstToken(len(self.sequence.token_ids), request.rank))
        if isinstance(rule := request.options.lossy, LossyRule) and request.recording is None:
            token_bytes, by_draft = self.tokenizer.token_bytes.of, self._recorder.by_draft
            return LossySampler(sampling, vocab_size, self._constraint, rule, self._speculator, token_bytes, by_draft)
        if request.recording is not None:
            start = len(self.sequence.token_ids)
            return ReplaySampler(request.recording.answer, start, sampling, vocab_size, self._constraint, stages)
        if self._constraint is None or request.futures is None:
            return Sampler(sampling, vocab_size, self._constraint, stages)
        from .structure.grammar_aligned import AlignedSampler  # noqa: PLC0415 -- few answers need it

        request.futures.begin(earlier)
        return AlignedSampler(sampling, vocab_size, self._constraint, request.futures)

    def _make_room(self, max_tokens: int | None) -> bool:
        """Shorten the sequence, which fills the context, by its oldest turns or to a window; False if it cannot be."""
        sequence, prompt_length, context = self.sequence, self._prompt_length, self.sequence.arena.limit
        token_ids = sequence.token_ids
        if self.request.overflow is Overflow.TRIM:
            if self._chat is None:
                return False
            answer = token_ids[prompt_length:]
            try:
                self._chat, prompt_ids, left_out = trimmed(self._chat, len(answer), context, max_tokens)
            except (ContextError, TemplateError):
                return False
            if not left_out:
                return False
            self._prompt_length = len(prompt_ids)
            self._kept = sequence.continue_with([*prompt_ids, *answer])
            return True
        first = kept_first(self._chat, token_ids, context)
        newest = window(len(token_ids), first, context)
        kept = [*token_ids[:first], *token_ids[newest:]]
        if self.shift.drop(sequence.bound, first, newest):
            sequence.token_ids = kept
        else:  # the slots of the window are computed
            sequence.continue_with(kept)
        self._kept = first
        self._prompt_length = max(prompt_length - (newest - first), first)
        return True


def _needs_whole_logits(request: Request, speculator: Speculator | None, graph_io: GraphIO) -> bool:
    """Whether an answer needs more logits of a position than the best ones, which a device can give alone."""
    sampling = request.sampling
    special = (request.grammar, request.rank, request.search, request.options.strategies or None, graph_io.blocks)
    if sampling.adjusts or request.needs_logprobs or any(each is not None for each in special):
        return True
    # Near ties are found by the difference of the best two.
    needed = (1 + request.options.exact) if sampling.greedy else sampling.top_k
    given = 1 if graph_io.top is None else graph_io.top.count
    return not 0 < needed <= given or (speculator is not None and speculator.logits_needed > given)
