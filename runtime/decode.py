"""The decode loop: token ids in, token ids out, one round at a time.

A round runs one pass over the weights and emits the tokens it is sure of. The token a round ends with is the next
round's anchor: it is run together with whatever follows it, so between rounds the arena holds one row less than there
are tokens. Every round leaves the arena valid; a consumer may stop at any of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from ..errors import ContextError
from .graph.bound_session import BoundSession
from .sampling import Logits
from .speculation.near_ties import Cancelled, NearTies
from .speculation.speculator import PassTimes, Round, Speculator
from .speculation.tree import Tree
from .speculation.verification import TokenSampler, VerifyResult

PREFILL_TOKENS: Final = 128
"""Prompt tokens per pass: wide enough for the matrix products (256 gains under 2 %), few enough to bound the memory of
the activations and to let a prompt be cancelled soon."""


class FinishReason(Enum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Step:
    """What one round gave: the tokens it emitted, an end-of-sequence token left out, and whether it was the last."""

    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    target_passes: int = 1
    target_s: float = 0.0
    """Seconds in the target's pass; not counted for the prompt's."""
    round: Round | None = None
    """The account of a round that drafted, or might have."""

    @property
    def produced(self) -> int:
        """Tokens the model produced in the round, an end-of-sequence token included."""
        return len(self.tokens) + (self.finish is FinishReason.STOP)


@dataclass(frozen=True)
class DecodeLimits:
    """Where decoding ends: after `max_tokens` tokens (None: at the context's end) or at one of the `eos` ids."""

    max_tokens: int | None = None
    eos: frozenset[int] = frozenset()


def decode(
    bound: BoundSession,
    prompt: Sequence[int],
    chooser: TokenSampler,
    limits: DecodeLimits,
    cancelled: Callable[[], bool],
    speculator: Speculator | None = None,
    near_ties: NearTies | None = None,
) -> Generator[Step, None, None]:
    """Continue `prompt`, whose first tokens may already be in the arena, and yield one `Step` a round.

    The arena's committed rows must be those of `prompt[:arena.length]`. The first step comes from the prompt's last
    pass. `cancelled` is asked before every pass. With a `speculator`, a pass verifies what it proposes; the text is the
    same, as far as passes over one row and over several agree. With `near_ties`, it is even where they do not.

    Raises:
        ContextError: the prompt leaves no room for a single new token.
    """
    arena = bound.arena
    if not prompt:
        raise ValueError("an empty prompt has no last token to continue from")
    room = arena.limit - len(prompt)
    if room < 1:
        raise ContextError(
            f"the prompt has {len(prompt)} tokens and the model's context is {arena.limit}",
            "shorten it, or start the conversation again",
        )
    most = room if limits.max_tokens is None else min(limits.max_tokens, room)
    # At least the last token has to run, or there would be no logits to choose from.
    arena.rewind_to(min(arena.length, len(prompt) - 1))
    chooser.observe(prompt)

    try:
        logits, passes = _read(bound, prompt, cancelled, near_ties)
        anchor = chooser.choose(logits, len(prompt))
        step = _step((anchor,), limits.eos, most, passes)
        left = most - 1
        if speculator is not None and step.finish is None:
            speculator.follow([*prompt, anchor])
        while True:
            yield step
            if step.finish is not None:
                return
            if cancelled():
                raise Cancelled
            chooser.observe((anchor,))
            if near_ties is not None:
                near_ties.append(step.tokens)
            if speculator is None or speculator.resting:
                step = _plain(bound, chooser, anchor, limits.eos, left, speculator, near_ties)
            else:
                step = _speculate(bound, chooser, limits.eos, left, speculator, near_ties)
            left -= step.produced
            anchor = step.tokens[-1] if step.tokens else anchor
    except Cancelled:
        yield Step((), FinishReason.CANCELLED, target_passes=0)


def _read(
    bound: BoundSession, prompt: Sequence[int], cancelled: Callable[[], bool], near_ties: NearTies | None
) -> tuple[Logits, int]:
    """Run what the arena lacks of the prompt. Returns the last row's logits `[V]` and the passes it took."""
    arena = bound.arena
    passes = 0
    if near_ties is not None:
        near_ties.begin(prompt)
        passes = near_ties.rows
    while arena.length < len(prompt):
        if cancelled():
            raise Cancelled
        chunk = prompt[arena.length : arena.length + bound.most_rows(PREFILL_TOKENS)]
        logits = bound.forward(chunk, rows=(len(chunk) - 1,))[0]
        arena.commit(len(chunk))
        passes += 1
    return logits, passes


def _plain(
    bound: BoundSession,
    chooser: TokenSampler,
    anchor: int,
    eos: frozenset[int],
    most: int,
    speculator: Speculator | None,
    near_ties: NearTies | None,
) -> Step:
    """One round without a proposal."""
    started = time.perf_counter()
    logits = bound.forward((anchor,))[0]
    bound.arena.commit(1)
    passes = 1
    if near_ties is not None:
        before = near_ties.rows
        logits = near_ties.settled(logits)
        passes += near_ties.rows - before
    seconds = time.perf_counter() - started
    token = chooser.choose(logits, bound.arena.length)
    if speculator is not None:
        speculator.skip(token)
    return _step((token,), eos, most, passes, seconds)


def _speculate(
    bound: BoundSession,
    chooser: TokenSampler,
    eos: frozenset[int],
    most: int,
    speculator: Speculator,
    near_ties: NearTies | None,
) -> Step:
    """One round: draft, verify in one pass, keep the accepted rows."""
    arena = bound.arena
    base = arena.length
    # A row of the tree takes a slot of the arena whether it is accepted or not.
    draft = speculator.propose(base, most, arena.limit - base)
    tree = draft.tree
    started = time.perf_counter()
    if tree.is_chain:
        logits = bound.forward(tree.tokens)
    else:
        logits = bound.forward(tree.tokens, positions=base + tree.depths, tree_mask=tree.mask)
    ended = time.perf_counter()
    seconds = ended - started
    again, again_s = 0, 0.0
    if near_ties is None:
        verdict = speculator.verify(draft, logits, chooser, base + 1, eos, most)
    else:
        before = near_ties.rows
        verdict = near_ties.match(tree, logits, base + 1, eos, most)
        again = near_ties.rows - before
        again_s = time.perf_counter() - ended if again else 0.0
    if not again:
        _keep(bound, tree, verdict)
    checking_s = time.perf_counter() - ended - again_s
    report = speculator.observe(draft, verdict, logits, base, PassTimes(seconds, again_s, checking_s))
    return _step(verdict.emitted(tree), eos, most, 1 + again, report.target_s, report)


def _keep(bound: BoundSession, tree: Tree, verdict: VerifyResult) -> None:
    """Commit the rows of the accepted path."""
    if len(tree) == 1:
        bound.arena.commit(1)
    else:
        bound.arena.compact(bound.arena.length, verdict.path)


def _step(
    emitted: tuple[int, ...],
    eos: frozenset[int],
    most: int,
    passes: int,
    target_s: float = 0.0,
    report: Round | None = None,
) -> Step:
    """The step that emits these tokens, of which at most the last ends the text."""
    if emitted[-1] in eos:
        return Step(emitted[:-1], FinishReason.STOP, passes, target_s, report)
    return Step(emitted, FinishReason.LENGTH if len(emitted) >= most else None, passes, target_s, report)
