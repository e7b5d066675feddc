"""The decode loop: token ids in, token ids out, one round at a time.

A round runs one forward pass and emits every token that the pass decides. The last token of a round is the anchor of
the next one: it runs together with the draft tokens that follow it, so between rounds the cache holds one slot less
than there are tokens. Every round leaves the cache valid, so a consumer may stop after any of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ..errors import ContextError, InputError
from ..models.progress import Progress, silent
from .graph.bound_session import BoundSession
from .prefill import Cancelled, never, prefill
from .speculation.near_ties import NearTies
from .speculation.speculator import Round, RoundTiming, Speculator
from .speculation.verification import TokenSampler


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Step:
    """Result of one round."""

    tokens: tuple[int, ...]
    """Emitted token ids, without an end-of-sequence token."""
    finish: FinishReason | None = None
    """Why decoding ended with this round; None if it goes on."""
    target_passes: int = 1
    target_s: float = 0.0
    """Seconds in the target's passes; 0 for the prefill."""
    round: Round | None = None
    """Statistics of a round in which drafting was enabled."""

    @property
    def produced(self) -> int:
        """Number of tokens the model produced in the round, an end-of-sequence token included."""
        return len(self.tokens) + (self.finish is FinishReason.STOP)


@dataclass(frozen=True)
class DecodeLimits:
    """What ends decoding, and what learns how far it is before the first token."""

    max_tokens: int | None = None
    """Largest number of tokens to produce; None for the rest of the context."""
    eos: frozenset[int] = frozenset()
    """End-of-sequence token ids."""
    cancelled: Callable[[], bool] = never
    """Called before every pass; True ends decoding."""
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
    bound: BoundSession,
    prompt_ids: Sequence[int],
    sampler: TokenSampler,
    limits: DecodeLimits,
    speculator: Speculator | None = None,
    near_ties: NearTies | None = None,
) -> Generator[Step, None, None]:
    """Prefill `prompt_ids`, then continue it, and yield one `Step` per round.

    Args:
        bound: the session; its arena may already hold the slots of `prompt_ids[:arena.length]`.
        prompt_ids: token ids of the prompt.
        sampler: chooses every token.
        limits: what ends decoding.
        speculator: proposes draft tokens that a pass verifies; None for plain decoding. The text is the same as far as
            wide passes compute the logits of narrow ones.
        near_ties: recomputes near ties, so that the text is the same even where wide passes differ.

    Raises:
        ContextError: the prompt leaves no room for a single new token.
        InputError: the prompt is empty.
    """
    arena = bound.arena
    check_prompt_fits(prompt_ids, arena.limit)
    remaining = arena.limit - len(prompt_ids)
    if limits.max_tokens is not None:
        remaining = min(limits.max_tokens, remaining)
    eos, cancelled = limits.eos, limits.cancelled
    # The last token has to run again even if its slot is cached, or there would be no logits to choose from.
    arena.rewind_to(min(arena.length, len(prompt_ids) - 1))
    sampler.observe_prompt(prompt_ids)
    passes, target_s = 0, 0.0
    report: Round | None = None
    try:
        if near_ties is not None:
            near_ties.reset(prompt_ids)
            passes = near_ties.passes
        logits, prefill_passes = prefill(bound, prompt_ids, cancelled, limits.progress)
        passes += prefill_passes
        tokens: tuple[int, ...] = (sampler.choose(logits, len(prompt_ids)),)
        if speculator is not None:
            speculator.reset([*prompt_ids, *tokens])
        while True:
            remaining -= len(tokens)
            ended = tokens[-1] in eos
            finish = FinishReason.STOP if ended else FinishReason.LENGTH if remaining <= 0 else None
            yield Step(tokens[:-1] if ended else tokens, finish, passes, target_s, report)
            if finish is not None:
                return
            if cancelled():
                raise Cancelled
            anchor = tokens[-1]
            sampler.observe((anchor,))
            if near_ties is not None:
                near_ties.append(tokens)
            if speculator is not None and not speculator.disabled:
                tokens, passes, report = _speculate(bound, sampler, eos, remaining, speculator, near_ties)
                target_s = report.target_s
                continue
            started = time.perf_counter()
            logits = bound.forward((anchor,))[0]
            arena.commit(1)
            passes, report = 1, None
            if near_ties is not None:
                before = near_ties.passes
                logits = near_ties.resolve(logits)
                passes += near_ties.passes - before
            target_s = time.perf_counter() - started
            tokens = (sampler.choose(logits, arena.length),)
            if speculator is not None:
                speculator.skip_round(tokens[0], target_s / passes)
    except Cancelled:
        yield Step((), FinishReason.CANCELLED, target_passes=0)


def _speculate(
    bound: BoundSession,
    sampler: TokenSampler,
    eos: frozenset[int],
    remaining: int,
    speculator: Speculator,
    near_ties: NearTies | None,
) -> tuple[tuple[int, ...], int, Round]:
    """Draft, verify in one pass, and keep the slots of the accepted tokens.

    Returns:
        The emitted tokens, the number of passes, and the statistics of the round.
    """
    arena = bound.arena
    base = arena.length
    # Every node of the tree takes a cache slot, whether it is accepted or not.
    draft = speculator.propose(base, remaining, arena.limit - base)
    tree = draft.tree
    started = time.perf_counter()
    if tree.is_chain:
        logits = bound.forward(tree.tokens)
    else:
        logits = bound.forward(tree.tokens, positions=base + tree.depths, tree_mask=tree.mask)
    ended = time.perf_counter()
    recomputed, recompute_s = 0, 0.0
    if near_ties is None:
        result = speculator.verify(draft, logits, sampler, base + 1, eos, remaining)
    else:
        before = near_ties.passes
        result = near_ties.verify_tree(tree, logits, base + 1, eos, remaining)
        recomputed = near_ties.passes - before
        recompute_s = time.perf_counter() - ended if recomputed else 0.0
    if not recomputed:  # otherwise the slots of the path were recomputed and committed
        if len(tree) == 1:
            arena.commit(1)
        else:
            arena.compact(base, result.accepted_path)
    verify_s = time.perf_counter() - ended - recompute_s
    report = speculator.observe(draft, result, logits, base, RoundTiming(ended - started, recompute_s, verify_s))
    return result.emitted(tree), 1 + recomputed, report
