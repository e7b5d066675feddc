"""The decode loop: token ids in, token ids out, one round at a time.

A round runs one forward pass and emits every token that the pass decides. The last token of a round is the anchor of
the next one: it runs together with the draft tokens that follow it, so between rounds the cache holds one slot less
than there are tokens. Every round leaves the cache valid, so a consumer may stop after any of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from ..errors import ContextError, InputError
from ..models.progress import Progress, silent
from .graph.bound_graph import BoundGraph, OtherTexts
from .kv.arena import KVArena
from .prefill import Cancelled, never, prefill
from .sampling.logit_stage import Logits
from .sampling.logprobs import LogSoftmax, PositionLogprobs
from .sampling.sampler import Sampler
from .sampling.token_mask import TokenConstraint
from .speculation.rounds import OriginKind, Round, TokenOrigin, origins_of
from .speculation.speculator import Speculator
from .speculation.verification import NearTies


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class Step(NamedTuple):
    """Result of one round."""

    tokens: tuple[int, ...]
    """Emitted token ids, without an end-of-sequence token."""
    finish: FinishReason | None = None
    """Why decoding ended with this round; None if it goes on."""
    target_passes: int = 1
    target_s: float = 0.0
    """Seconds in the target's passes; 0 for the prefill."""
    round: Round | None = None
    """The draft and its statistics; None if none was made."""
    logprobs: tuple[PositionLogprobs, ...] = ()
    """Log-probabilities at the position of each token, if they were asked for; an end-of-sequence token's come last."""
    origins: tuple[TokenOrigin, ...] = ()
    """How each token came to be, if log-probabilities were asked for, or the model fills blocks."""
    prompt_readers: Mapping[str, int] | None = None
    """Number of tokens that each graph read before the first one, by its name; None in rounds that read nothing."""
    replayed: int = 0
    """Number of tokens that the passes ran once more, because a recurrent state cannot be cut back."""
    closed: bool = False
    """Whether the answer stops without an end-of-sequence token, because nothing else could follow."""

    @property
    def produced(self) -> int:
        """Number of tokens the model produced in the round, an end-of-sequence token included."""
        return len(self.tokens) + (self.finish is FinishReason.STOP and not self.closed)


@dataclass(frozen=True)
class DecodeLimits:
    """What ends decoding, and who is told how much of the prompt has been read."""

    max_tokens: int | None = None
    """Largest number of tokens to produce; None for the rest of the context."""
    eos: frozenset[int] = frozenset()
    """End-of-sequence token ids."""
    cancelled: Callable[[], bool] = never
    """Called before every pass; True ends decoding. In an engine it is `RequestQueue.yield_turn`, which lets other
    requests run a pass before it returns."""
    progress: Progress = silent
    """Receives the share of the prompt that has been read."""


def check_prompt_fits(prompt_ids: Sequence[int], context: int) -> None:
    """Check that a prompt leaves room for an answer in a context of `context` tokens.

    Raises:
        ContextError: it does not.
        InputError: the prompt is empty.
    """
    if not prompt_ids:
        raise InputError("the prompt is empty", "give at least one character")
    if len(prompt_ids) >= context:
        raise ContextError(
            f"the prompt has {len(prompt_ids)} tokens and the model's context is {context}",
            "shorten it, or start the conversation again",
        )


def decode(
    bound: BoundGraph,
    prompt_ids: Sequence[int],
    sampler: Sampler,
    limits: DecodeLimits,
    speculator: Speculator | None = None,
    near_ties: NearTies | None = None,
    log_softmax: LogSoftmax | None = None,
    constraint: TokenConstraint | None = None,
    *,
    answer_length: int = 0,
) -> Generator[Step, None, None]:
    """Prefill `prompt_ids`, then continue it, and yield one `Step` per round; errors as for `check_prompt_fits`.

    Args:
        bound: the session; its arena may already hold the slots of `prompt_ids[:arena.length]`.
        prompt_ids: token ids of the prompt, and of the answer so far.
        sampler: chooses every token.
        limits: what ends decoding.
        speculator: drafts; None for plain decoding, whose text is the same as far as wide passes compute equal logits.
        near_ties: recomputes near ties, so that the text is the same even where they do not.
        log_softmax: computes log-probabilities; None for none.
        constraint: the sampler's, whose masks are computed while passes run; None if any token may come.
        answer_length: number of tokens at the end of `prompt_ids` that belong to the answer, for its penalties.
    """
    arena = bound.arena
    remaining = begin_answer(bound, prompt_ids, answer_length, sampler, limits, constraint)
    try:
        before, recomputing = arena.replayed, 0 if near_ties is None else near_ties.reset(prompt_ids)
        last, passes, readers = prefill(bound, prompt_ids, limits.cancelled, limits.progress)
        first = sampler.choose(last, len(prompt_ids))
        step = Step((first,), target_passes=passes + recomputing, prompt_readers=readers)
        logits: Iterable[Logits] = (last,)
        if speculator is not None:
            speculator.reset([*prompt_ids, first])
        while True:
            tokens = step.tokens
            remaining -= len(tokens)
            step = _finished(step, arena.replayed - before, limits.eos, constraint, remaining)
            before = arena.replayed
            yield _completed(step, logits, log_softmax)
            if step.finish is not None:
                return
            if limits.cancelled():
                raise Cancelled
            sampler.observe(tokens[-1:])
            if near_ties is not None:
                near_ties.append(tokens)
            # While drafting is disabled, only tokens that the constraint forces are drafted.
            if speculator is not None and (not speculator.disabled or (constraint is not None and constraint.forced())):
                step, logits = _speculate(bound, sampler, limits.eos, remaining, speculator, near_ties, constraint)
            else:
                if constraint is not None:
                    constraint.prepare()
                started = time.perf_counter()
                last = bound.forward(tokens[-1:])[0]
                arena.commit(1)
                step, logits = _chosen(last, sampler, arena, speculator, near_ties, started, before, bound.others)
    except Cancelled:
        yield Step((), FinishReason.CANCELLED, target_passes=0)


def _finished(
    step: Step, replayed: int, eos: frozenset[int], constraint: TokenConstraint | None, remaining: int
) -> Step:
    """The step with the number of tokens that ran once more, and the reason why decoding ends with it, if it does."""
    ended = step.tokens[-1] in eos
    closed = constraint is not None and not ended and constraint.ends_with(step.tokens[-1])
    finish = FinishReason.STOP if ended or closed else FinishReason.LENGTH if remaining <= 0 else None
    if finish is None and not replayed:  # the usual case: every copy takes microseconds between two passes
        return step
    return step._replace(finish=finish, closed=closed, replayed=replayed)


def _completed(step: Step, logits: Iterable[Logits], log_softmax: LogSoftmax | None) -> Step:
    """A step without its end-of-sequence token, and with log-probabilities of its tokens if there is a `log_softmax`.

    `logits` has the logits float32 `[V]` that each token was chosen from.
    """
    every = step.tokens
    tokens = every[:-1] if step.finish is FinishReason.STOP and not step.closed else every
    if log_softmax is None:
        return step if tokens is every else step._replace(tokens=tokens)
    logprobs = tuple(log_softmax.at(*chosen) for chosen in zip(logits, every, strict=False))
    if step.round is not None:
        origins = origins_of(step.round, every)
    else:
        origins = (TokenOrigin(OriginKind.DECODED if step.prompt_readers is None else OriginKind.PREFILL),)
    return step._replace(tokens=tokens, logprobs=logprobs, origins=origins[: len(tokens)])


def begin_answer(
    bound: BoundGraph,
    prompt_ids: Sequence[int],
    answer_length: int,
    sampler: Sampler,
    limits: DecodeLimits,
    constraint: TokenConstraint | None = None,
) -> int:
    """Start the cache, the sampler and the constraint on a sequence; returns the largest number of tokens to produce.

    Args and errors are those of `decode`.
    """
    arena, prompt_length = bound.arena, len(prompt_ids) - answer_length
    check_prompt_fits(prompt_ids, arena.limit)
    # The last token has to run again even if its slot is cached, or there would be no logits to choose from.
    arena.rewind_to(min(arena.length, len(prompt_ids) - 1))
    sampler.observe_prompt(prompt_ids[:prompt_length])
    sampler.observe(prompt_ids[prompt_length:])
    if constraint is not None:
        constraint.prepare()
    return min(limits.max_tokens or arena.limit, arena.limit - len(prompt_ids))


def _chosen(
    logits: Logits,
    sampler: Sampler,
    arena: KVArena,
    speculator: Speculator | None,
    near_ties: NearTies | None,
    started: float,
    before: int,
    others: OtherTexts,
) -> tuple[Step, Iterable[Logits]]:
    """The token chosen from the logits float32 `[V]` of a plain pass.

    It started at a time of `time.perf_counter`, when the arena had replayed `before` tokens; `others` ran in it too.

    Returns:
        The step, with an end-of-sequence token, and the logits of each token, which are valid until the next pass.
    """
    replayed, passes = arena.replayed - before, 1
    if near_ties is not None:
        passes -= near_ties.passes
        logits = near_ties.resolve(logits)
        passes += near_ties.passes
    target_s = time.perf_counter() - started - others.waited_s
    token = sampler.choose(logits, arena.length)
    if speculator is not None:
        speculator.others = others
        speculator.skip_round(token, target_s / passes, replayed)
    return Step((token,), target_passes=passes, target_s=target_s), (logits,)


def _speculate(
    bound: BoundGraph,
    sampler: Sampler,
    eos: frozenset[int],
    remaining: int,
    speculator: Speculator,
    near_ties: NearTies | None,
    constraint: TokenConstraint | None,
) -> tuple[Step, Iterable[Logits]]:
    """Draft, verify in one pass, and keep the slots of the accepted tokens; returns as `_chosen` does."""
    arena = bound.arena
    base = arena.length
    # Every node of the tree takes a cache slot, whether it is accepted or not.
    draft = speculator.propose(base, remaining, arena.limit - base, constraint, arena.replay)
    tree = draft.tree
    if constraint is not None:
        constraint.prepare(tree.token_ids, tree.parent_nodes)
    started = time.perf_counter()
    if tree.is_chain:
        logits = bound.forward(tree.token_ids)
    else:
        logits = bound.forward(tree.token_ids, positions=base + tree.depths, tree_mask=tree.mask)
    ended = time.perf_counter()
    target_s = ended - started - bound.others.waited_s
    recomputed, recompute_s = 0, 0.0
    if near_ties is None:
        result = speculator.verify(draft, logits, sampler, base + 1, eos, remaining)
    else:
        before = near_ties.passes
        result, logits = near_ties.verify_tree(tree, logits, base + 1, eos, remaining)
        recomputed = near_ties.passes - before
        recompute_s = time.perf_counter() - ended if recomputed else 0.0
    if not recomputed:  # otherwise the slots of the path were recomputed and committed
        if len(tree) == 1:
            arena.commit(1)
        else:
            arena.compact(base, result.accepted_path)
    verify_s = time.perf_counter() - ended - recompute_s
    speculator.others = bound.others
    speculator.observe(draft, result, logits, base, target_s, recompute_s, verify_s)
    at_path = (logits[node] for node in result.accepted_path)
    step = Step(result.emitted(tree), target_passes=1 + recomputed, target_s=draft.target_s, round=draft)
    return step, at_path
