"""What a free predictor is: given the text, and any continuation of it, a few guesses for the next token.

Predictors are cheap lookups (microseconds). A guess comes with an evidence bucket, not a probability: how often guesses
of a bucket come true is learned while decoding (`mixing`), so that estimates mean what they say on any model and text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from ..tree import Source

State: TypeAlias = Any
"""Where a predictor stands after a text; only the predictor that made it looks inside. Immutable."""


class Candidate(NamedTuple):
    """A token that may come next, and which kind of evidence speaks for it."""

    token: int
    bucket: int


class Drafter(Protocol):
    """Guesses next tokens from the text."""

    @property
    def source(self) -> Source:
        """Whose guesses these are."""

    @property
    def prior(self) -> Sequence[float]:
        """For every evidence bucket, the share of its guesses that come true as far as is known beforehand."""

    def follow(self, tokens: Sequence[int]) -> None:
        """Make `tokens` the text. Called when it has grown by a few tokens, and when it is another one altogether."""

    def append(self, token: int) -> None:
        """Let the text grow by one token."""

    def state(self) -> State:
        """The state after the text."""

    def after(self, state: State, token: int) -> State:
        """The state after one more token, which the text does not get."""

    def candidates(self, state: State) -> Sequence[Candidate]:
        """The likeliest next tokens, best first, each token once; few or none."""


class CostlyDrafter(Drafter, Protocol):
    """A predictor whose guesses take time worth counting: a draft model. `after` is free; `candidates` runs it."""

    def seconds(self, state: State) -> float:
        """What `candidates(state)` is expected to take now."""

    def spent(self) -> float:
        """Seconds that guessing took since this was last asked for."""
