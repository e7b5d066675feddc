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

from ..edge.errors import ContextError
from .session import BoundSession
from .speculate import Round, Speculator
from .verify import Chooser, match

PREFILL_ROWS: Final = 128
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
    chooser: Chooser,
    limits: DecodeLimits,
    cancelled: Callable[[], bool],
    speculator: Speculator | None = None,
) -> Generator[Step, None, None]:
    """Continue `prompt`, whose first tokens may already be in the arena, and yield one `Step` a round.

    The arena's committed rows must be those of `prompt[:arena.length]`. The first step comes from the prompt's last
    pass. `cancelled` is asked before every pass. With a `speculator`, a pass verifies what it proposes; the text is the
    same.

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

    passes = 0
    for start in range(arena.length, len(prompt), PREFILL_ROWS):
        if cancelled():
            yield Step((), FinishReason.CANCELLED, target_passes=0)
            return
        chunk = prompt[start : start + PREFILL_ROWS]
        logits = bound.forward(chunk, rows=(len(chunk) - 1,))
        arena.commit(len(chunk))
        passes += 1

    anchor = chooser.choose(logits[0], len(prompt))
    step = _step((anchor,), limits.eos, most, passes)
    left = most - 1
    if speculator is not None and step.finish is None:
        speculator.follow([*prompt, anchor])
    while True:
        yield step
        if step.finish is not None:
            return
        if cancelled():
            yield Step((), FinishReason.CANCELLED, target_passes=0)
            return
        chooser.observe((anchor,))
        if speculator is None or speculator.resting:
            started = time.perf_counter()
            logits = bound.forward((anchor,))
            seconds = time.perf_counter() - started
            arena.commit(1)
            anchor = chooser.choose(logits[0], arena.length)
            step = _step((anchor,), limits.eos, left, 1, seconds)
            left -= 1
            if speculator is not None:
                speculator.skip(anchor)
        else:
            emitted, report = _speculate(bound, chooser, limits.eos, left, speculator)
            anchor = emitted[-1]
            step = _step(emitted, limits.eos, left, 1, report.target_s, report)
            left -= len(emitted)


def _speculate(
    bound: BoundSession, chooser: Chooser, eos: frozenset[int], most: int, speculator: Speculator
) -> tuple[tuple[int, ...], Round]:
    """One round: draft, verify in one pass, keep the accepted rows. Returns the tokens it gives and its account."""
    arena = bound.arena
    base = arena.length
    # A row of the tree takes a slot of the arena whether it is accepted or not.
    draft = speculator.propose(base, min(most, arena.limit - base))
    tree = draft.tree
    started = time.perf_counter()
    if tree.is_chain:
        logits = bound.forward(tree.tokens)
    else:
        logits = bound.forward(tree.tokens, positions=base + tree.depths, tree_mask=tree.mask)
    seconds = time.perf_counter() - started
    verdict = match(tree, logits, chooser, base + 1, eos, most)
    arena.compact(base, verdict.path)
    report = speculator.observe(draft, verdict, logits, base, seconds)
    return verdict.emitted(tree), report


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
