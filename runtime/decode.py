"""The decode loop: token ids in, token ids out, one round at a time.

A round runs one pass over the weights and emits the tokens it is sure of. The token a round ends with is the next
round's anchor: it is run together with whatever follows it, so between rounds the arena holds one row less than there
are tokens. Every round leaves the arena valid; a consumer may stop at any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from ..edge.errors import ContextError
from .sampling import Sampler
from .session import BoundSession

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
    sampler: Sampler,
    limits: DecodeLimits,
    cancelled: Callable[[], bool],
) -> Generator[Step, None, None]:
    """Continue `prompt`, whose first tokens may already be in the arena, and yield one `Step` a round.

    The arena's committed rows must be those of `prompt[:arena.length]`. The first step comes from the prompt's last
    pass. `cancelled` is asked before every pass.

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
    sampler.observe(prompt)

    passes = 0
    for start in range(arena.length, len(prompt), PREFILL_ROWS):
        if cancelled():
            yield Step((), FinishReason.CANCELLED, target_passes=0)
            return
        chunk = prompt[start : start + PREFILL_ROWS]
        logits = bound.forward(chunk, rows=(len(chunk) - 1,))
        arena.commit(len(chunk))
        passes += 1

    position = len(prompt)
    anchor = sampler.choose(logits[0], position)
    while True:
        if anchor in limits.eos:
            yield Step((), FinishReason.STOP, passes)
            return
        position += 1
        if position - len(prompt) >= most:
            yield Step((anchor,), FinishReason.LENGTH, passes)
            return
        yield Step((anchor,), None, passes)
        if cancelled():
            yield Step((), FinishReason.CANCELLED, target_passes=0)
            return
        sampler.observe((anchor,))
        logits = bound.forward((anchor,))
        arena.commit(1)
        passes = 1
        anchor = sampler.choose(logits[0], position)
