"""Chunks of an answer, the whole reply, and its statistics."""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any, Final, TypeVar

from .decode import FinishReason, Step
from .sampling.logprobs import NO_LOGPROBS, LogprobTotals
from .speculation.choice import SOURCE_NAMES
from .speculation.rounds import Round
from .speculation.tree import Source
from .text.token_logprobs import TokenLogprob
from .tools.answer_parts import AnswerParts, joined_parts
from .tools.calls import assistant_message

_Record = TypeVar("_Record")


@dataclass(frozen=True)
class DraftCounts:
    """Numbers of draft tokens that were verified and that were accepted."""

    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(self.drafted + other.drafted, self.accepted + other.accepted)

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens divided by verified ones; 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True)
class AnswerCandidate:
    """One of the answers that the best were chosen of."""

    seed: int
    tokens: int
    """Number of tokens that were generated."""
    mean_logprob: float
    """Mean log-probability of these tokens."""
    finish_reason: FinishReason | None
    """Why it ended; None if it was stopped because it could not, or would not, be among the best."""
    choice: int | None = None
    """Its index among the answers that were returned; None if it was not."""
    vote_logprob: float | None = None
    """Log-sum-exp of the log-probabilities of the answers that agree with it; None where answers do not vote."""


@dataclass(frozen=True)
class BestOf:
    """What the choice of the best answers took."""

    candidates: tuple[AnswerCandidate, ...]
    """All answers that were generated, in the order of their seeds."""
    most_tokens: int | None = None
    """Largest number of tokens that each could have had; None for no limit."""

    @property
    def discarded_tokens(self) -> int:
        """Number of tokens of the candidates that were not returned."""
        return sum(each.tokens for each in self.candidates if each.choice is None)

    @property
    def stopped(self) -> int:
        """Number of candidates that were stopped before their end."""
        return sum(each.finish_reason is None for each in self.candidates)

    @property
    def saved_tokens(self) -> int | None:
        """Number of tokens that the stopped candidates would have had at most; None where there is no limit."""
        if self.most_tokens is None:
            return None
        return sum(self.most_tokens - each.tokens for each in self.candidates if each.finish_reason is None)


def _shows_defaults(record: type[_Record]) -> type[_Record]:
    """Decorate a dataclass so that its signature shows what default factories make, not that there are some."""
    made = {each.name: each.default_factory() for each in fields(record) if each.default_factory is not MISSING}  # type: ignore[arg-type]
    signature = inspect.signature(record)
    parameters = [each.replace(default=made.get(name, each.default)) for name, each in signature.parameters.items()]
    record.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return record


@_shows_defaults
@dataclass(frozen=True)
class Stats:
    """Statistics of one answer, or of several added up. Times are in seconds."""

    prompt_tokens: int = 0
    """Number of tokens of the prompt, those included that the answer was given to begin with."""
    reused_tokens: int = 0
    """Number of prompt tokens whose cache slots were there already."""
    merged_tokens: int = 0
    """Number of tokens of images that the prompt lacks, because `lossy_image_tokens` merged them with others."""
    completion_tokens: int = 0
    """Number of tokens the model produced, the end-of-sequence token included."""
    text_tokens: int = 0
    """Number of these without the end-of-sequence token."""
    target_passes: int = 0
    """Number of forward passes of the model, the prefill included."""
    decode_passes: int = 0
    """Number of forward passes after the first token."""
    replayed_tokens: int = 0
    """Number of tokens that passes ran once more, because the state of a layer without attention cannot be cut back."""
    first_token_s: float = 0.0
    """Seconds from the start of the request to the first token: measuring, loading drafters, and the prefill."""
    measuring_s: float = 0.0
    """Seconds of these in which a model that is new on this machine was measured, and its draft model."""
    drafter_loading_s: float = 0.0
    """Seconds of these in which the draft model and the other drafters were loaded."""
    total_s: float = 0.0
    """Seconds from the start of the request to the end of the answer."""
    drafted: int = 0
    """Number of draft tokens that were verified."""
    accepted: int = 0
    """Number of draft tokens that were accepted."""
    by_source: Mapping[str, DraftCounts] = field(default_factory=dict)
    """Draft tokens by the drafter's name."""
    by_depth: tuple[DraftCounts, ...] = ()
    """Draft tokens by their distance from the anchor; entry 0 is the token right after it."""
    draft_s: float = 0.0
    """Seconds in forward passes of the draft model, without those in which it ran ahead."""
    hidden_s: float = 0.0
    """Seconds in which the draft model ran ahead: on another device, while the model verified."""
    passes_ahead: int = 0
    """Number of the draft model's passes then; those during the last pass of an answer are not counted."""
    passes_kept: int = 0
    """Number of those that agreed with what the model then produced; the others were dropped."""
    target_s: float = 0.0
    """Seconds in forward passes of the target after the first token."""
    host_s: float = 0.0
    """Seconds of rounds with drafting outside of forward passes: look-ups, pruning, choosing tokens, learning."""
    rounds: tuple[Round | None, ...] = ()
    """Statistics of every round after the first token, if they were kept; None for a round with drafting disabled."""
    context_shifts: int = 0
    """Number of times that the answer filled the context, and older tokens made room for it."""
    answers: int = 1
    """Number of answers that these statistics add up."""
    prompt_readers: Mapping[str, int] = field(default_factory=dict)
    """Number of prompt tokens that each graph read, those left out whose cache slots were there already: `base` is the
    model's own graph, `int8` the int8 prompt graph."""
    logprob_totals: LogprobTotals = NO_LOGPROBS
    """Sums over the log-probabilities of the completion's tokens, if they were computed."""
    stop_sequence: str = ""
    """The stop sequence before which the answer ended; empty where it ended otherwise."""
    best_of: BestOf | None = None
    """How the best answers were chosen; only the first of them has this."""
    by_model: Mapping[str, int] = field(default_factory=dict)
    """Number of tokens of a lossy completion that the draft model chose, `draft`, and the model itself, `target`."""
    by_block_pass: Mapping[int, int] = field(default_factory=dict)
    """Number of tokens by the pass over their block, from 1, that found them; empty for a model without blocks."""

    def __add__(self, other: Stats) -> Stats:
        """Add the statistics of two answers. Their rounds are not kept."""
        sums: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in _SUMMED}
        nothing = DraftCounts()
        sources = {
            name: self.by_source.get(name, nothing) + other.by_source.get(name, nothing)
            for name in dict.fromkeys((*self.by_source, *other.by_source))
        }
        depths = zip_longest(self.by_depth, other.by_depth, fillvalue=nothing)
        counts = ("prompt_readers", "by_model", "by_block_pass")
        sums |= {name: dict(Counter(getattr(self, name)) + Counter(getattr(other, name))) for name in counts}
        by_depth = tuple(mine + its for mine, its in depths)
        totals = self.logprob_totals.joined(other.logprob_totals)
        return Stats(**sums, by_source=sources, by_depth=by_depth, logprob_totals=totals)

    @classmethod
    def total(cls, answers: Iterable[Stats]) -> Stats:
        """Add the statistics of several answers; without any answer, all are 0."""
        return sum(answers, cls(answers=0))

    @property
    def mean_logprob(self) -> float | None:
        """Mean log-probability of the completion's tokens; None if it was not computed."""
        return self.logprob_totals.mean if self.logprob_totals.tokens else None

    @property
    def prefill_s(self) -> float:
        """Seconds from the start of the prefill to the first token."""
        return self.first_token_s - self.measuring_s - self.drafter_loading_s

    @property
    def decode_tokens(self) -> int:
        """Number of tokens after the first token of each answer."""
        return max(self.completion_tokens - self.answers, 0)

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the end."""
        return self.total_s - self.first_token_s

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens per second after the first token; 0 if there was no second one."""
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Mean number of tokens from each pass after the first token; 1 without speculation."""
        return self.decode_tokens / self.decode_passes if self.decode_passes else 1.0

    @property
    def draft_counts(self) -> DraftCounts:
        """Number of verified and accepted draft tokens of all drafters together."""
        return DraftCounts(self.drafted, self.accepted)


_SUMMED: Final = tuple(each.name for each in fields(Stats) if each.type in ("int", "float"))
_RECORDED: Final = (
    *("prompt_tokens", "reused_tokens", "merged_tokens", "completion_tokens", "text_tokens"),
    *("context_shifts", "logprob_totals"),
)
"""Statistics that a `StatsRecorder` has under their names."""


class StatsRecorder:
    """Collects the steps of one answer and adds them up after its end, not between two passes.

    Args:
        prompt_tokens: number of tokens of the prompt, and merged_tokens of those of images that it lacks.

    Its construction is the start of the request.
    """

    def __init__(self, prompt_tokens: int, merged_tokens: int = 0) -> None:
        self.prompt_tokens: Final = prompt_tokens
        self.merged_tokens, self.reused_tokens = merged_tokens, 0
        self.completion_tokens = self.text_tokens = 0
        self.context_shifts = 0
        self.logprob_totals = NO_LOGPROBS
        self.by_draft: list[bool] = []
        """For every token of a lossy answer that was chosen, whether it was the draft model's choice."""
        self._steps: list[Step] = []
        self._started = time.perf_counter()
        self._first_token: float | None = None
        self._measuring_s = self._drafter_loading_s = 0.0

    def record_setup(self, *, measuring_s: float) -> None:
        """Record that the prefill begins now, after measurements that took this long and loading the drafters."""
        self._measuring_s = measuring_s
        self._drafter_loading_s = max(time.perf_counter() - self._started - measuring_s, 0.0)

    def add(self, step: Step) -> None:
        """Record a step."""
        if self._first_token is None:
            self._first_token = time.perf_counter()
        self._steps.append(step)

    def stats(self, *, keep_rounds: bool, stop_sequence: str = "") -> Stats:
        """Statistics of the answer, which ends now; with statistics of every round if `keep_rounds`."""
        ended = time.perf_counter()
        rounds = tuple(step.round for step in self._steps if step.target_s)
        kept = [one for one in rounds if one is not None]
        wide = [one for one in kept if one.width > 1]
        drafted, accepted = _sums(one.drafted for one in wide), _sums(one.accepted for one in wide)
        by_depth = zip_longest(
            _sums(one.drafted_by_depth for one in wide),
            _sums((1,) * sum(one.accepted) for one in wide),
            fillvalue=0,
        )
        passes = [step.target_passes for step in self._steps]
        by_source = zip(Source, drafted, accepted, strict=False)
        by_draft = self.by_draft[: self.completion_tokens]
        return Stats(
            **{name: getattr(self, name) for name in _RECORDED},
            target_passes=sum(passes),
            decode_passes=sum(passes[1:]),
            replayed_tokens=sum(step.replayed for step in self._steps),
            first_token_s=(self._first_token or ended) - self._started,
            measuring_s=self._measuring_s,
            drafter_loading_s=self._drafter_loading_s,
            total_s=ended - self._started,
            drafted=sum(drafted),
            accepted=sum(accepted),
            by_source={SOURCE_NAMES[source]: DraftCounts(*counts) for source, *counts in by_source if counts[0]},
            by_depth=tuple(DraftCounts(*counts) for counts in by_depth),
            draft_s=sum(one.draft_s for one in kept),
            hidden_s=sum(one.ahead.hidden_s for one in kept),
            passes_ahead=sum(one.ahead.passes for one in kept),
            passes_kept=sum(one.ahead.kept for one in kept),
            target_s=sum(step.target_s for step in self._steps),
            host_s=sum(one.host_s for one in kept),
            rounds=rounds if keep_rounds else (),
            prompt_readers=next((step.prompt_readers for step in self._steps if step.prompt_readers is not None), {}),
            stop_sequence=stop_sequence,
            by_block_pass=Counter(
                sorted(found for step in self._steps for each in step.origins if (found := each.block_pass))
            ),
            by_model={"draft": sum(by_draft), "target": by_draft.count(False)} if by_draft else {},
        )


def _sums(counts: Iterable[Sequence[int]]) -> list[int]:
    """Add up sequences of any lengths, index by index."""
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


@dataclass(frozen=True)
class Chunk(AnswerParts):
    """A piece of an answer. Only the last one has `finish_reason` and `stats`; its text may be empty."""

    finish_reason: FinishReason | None = None
    stats: Stats | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    """If they were asked for, the tokens whose text this chunk completes, those of reasoning and calls included. Tokens
    whose text is held back come with it in a later chunk."""
    index: int = 0
    """Which answer it belongs to, if several to one prompt were asked for; every one has a last chunk."""
    completion_tokens: int = 0
    """Number of tokens that the model has produced for the answer so far, as `Stats` counts them."""
    logprob_totals: LogprobTotals = NO_LOGPROBS
    """Sums over the log-probabilities of these tokens, if they were computed."""

    def with_parts(self, *parts: AnswerParts) -> Chunk:
        """The chunk with these parts of the answer instead of its text."""
        return replace(self, **joined_parts(parts))


@dataclass(frozen=True)
class Reply(AnswerParts):
    """A whole answer."""

    finish_reason: FinishReason
    stats: Stats
    logprobs: tuple[TokenLogprob, ...] = ()
    """The tokens of the text with their log-probabilities, if they were asked for."""
    alternatives: tuple[Reply, ...] = ()
    """Further answers to the prompt, if they were asked for."""

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation, to which the results of its calls are added."""
        return assistant_message(self.text, self.reasoning, self.tool_calls)

    @property
    def choices(self) -> tuple[Reply, ...]:
        """All answers to the prompt, this one first."""
        return (self, *self.alternatives)

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> Reply:
        """Join the chunks of an answer, or of several answers to one prompt.

        Raises:
            ValueError: the last chunk of one is missing.
        """
        by_answer: dict[int, list[Chunk]] = {}
        for chunk in chunks:
            by_answer.setdefault(chunk.index, []).append(chunk)
        if not by_answer:
            raise ValueError("the stream ended without a last chunk")
        first, *others = (cls._of_one(by_answer[index]) for index in sorted(by_answer))
        return replace(first, alternatives=tuple(others))

    @classmethod
    def _of_one(cls, chunks: Sequence[Chunk]) -> Reply:
        last = chunks[-1]
        if last.finish_reason is None or last.stats is None:
            raise ValueError("the stream ended without a last chunk")
        logprobs = tuple(token for chunk in chunks for token in chunk.logprobs)
        return cls(finish_reason=last.finish_reason, stats=last.stats, logprobs=logprobs, **joined_parts(chunks))
