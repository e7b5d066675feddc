"""The interface of drafters: token candidates for any continuation of a sequence.

Free drafters are cheap lookups (microseconds). A candidate comes with an evidence bucket, not a probability: the
acceptance rate of each bucket is learned while decoding (`mixing`), so that probabilities are calibrated for every
model and text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from ..tree import Source

State: TypeAlias = Any
"""A drafter's own description of a sequence; immutable, and only used by the drafter that made it."""


class Candidate(NamedTuple):
    """A token that may come next, and the bucket of the evidence for it."""

    token: int
    bucket: int


class Drafter(Protocol):
    """Proposes next tokens from the sequence."""

    @property
    def source(self) -> Source:
        """The source that its candidates are counted under."""

    @property
    def prior(self) -> Sequence[float]:
        """Prior acceptance rate of every evidence bucket."""

    def reset(self, token_ids: Sequence[int]) -> None:
        """Replace the sequence. The new one may be the old one with a few tokens more, or an unrelated one."""

    def append(self, token: int) -> None:
        """Append a token to the sequence."""

    def state(self) -> State:
        """The state at the end of the sequence."""

    def after(self, state: State, token: int) -> State:
        """The state after one more token; the sequence itself stays as it is."""

    def candidates(self, state: State) -> Sequence[Candidate]:
        """The most probable next tokens, best first, each token once; few or none."""


class CostlyDrafter(Drafter, Protocol):
    """A drafter whose candidates take considerable time: a draft model. `after` is free; `candidates` runs it."""

    def seconds(self, state: State) -> float:
        """Expected seconds of `candidates(state)` now."""

    def take_seconds_spent(self) -> float:
        """Seconds spent drafting since the last call of this method."""
