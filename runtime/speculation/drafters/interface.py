"""The interface of drafters, and the evidence of those that look for repetitions.

Free drafters are cheap lookups (microseconds). A candidate comes with an evidence bucket, not a probability: the
acceptance rate of each bucket is learned while decoding (`Mixer`), so that probabilities are calibrated for every
model and text.

A drafter that looks for repetitions finds earlier occurrences of the end of the sequence. The length of the match, and
whether all occurrences were followed by the same token, decide how reliable a candidate is, better than anything else
that was tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from ..tree import Source

State: TypeAlias = Any
"""A drafter's own description of a sequence; immutable, and only used by the drafter that made it."""
_CLASS_STARTS: Final = (1, 2, 3, 4, 5, 7, 10, 16, 32)
"""Shortest match of each class of match lengths."""
_LONGEST: Final = _CLASS_STARTS[-1]
_CLASS_OF: Final = tuple(max(0, sum(start <= length for start in _CLASS_STARTS) - 1) for length in range(_LONGEST + 1))
_WITHIN: Final = (
    # ONCE, ALWAYS, MOSTLY and SPLIT, each at rank 0 and higher ranks
    (0.29, 0.05, 0.55, 0.05, 0.36, 0.04, 0.11, 0.06),
    (0.47, 0.05, 0.76, 0.05, 0.40, 0.06, 0.18, 0.08),
    (0.59, 0.05, 0.81, 0.05, 0.50, 0.06, 0.20, 0.12),
    (0.64, 0.05, 0.86, 0.05, 0.58, 0.07, 0.24, 0.12),
    (0.71, 0.05, 0.87, 0.05, 0.60, 0.07, 0.24, 0.12),
    (0.77, 0.05, 0.90, 0.05, 0.62, 0.08, 0.25, 0.12),
    (0.86, 0.05, 0.91, 0.05, 0.64, 0.08, 0.32, 0.12),
    (0.93, 0.05, 0.97, 0.05, 0.67, 0.08, 0.40, 0.12),
    (0.98, 0.05, 0.99, 0.05, 0.70, 0.09, 0.45, 0.15),
)
_EARLIER: Final = (
    (0.12, 0.03, 0.21, 0.03, 0.21, 0.05, 0.07, 0.04),
    (0.16, 0.03, 0.43, 0.03, 0.27, 0.07, 0.08, 0.05),
    (0.21, 0.03, 0.45, 0.03, 0.35, 0.08, 0.09, 0.06),
    (0.34, 0.03, 0.55, 0.03, 0.45, 0.08, 0.11, 0.06),
    (0.36, 0.03, 0.63, 0.03, 0.48, 0.08, 0.15, 0.08),
    (0.41, 0.03, 0.82, 0.03, 0.69, 0.08, 0.19, 0.08),
    (0.55, 0.03, 0.90, 0.03, 0.80, 0.08, 0.20, 0.08),
    (0.60, 0.03, 0.92, 0.03, 0.85, 0.08, 0.20, 0.08),
    (0.60, 0.03, 0.92, 0.03, 0.85, 0.08, 0.20, 0.08),
)
SAME_CONVERSATION: Final = tuple(rate for row in _WITHIN for rate in row)
"""Prior acceptance rate of each bucket, for repetitions within a conversation.

Measured on Llama-3-8B's answers in 80 two-turn MT-Bench conversations, and smoothed so that no rate falls with the
length of the match. Candidates of ONCE and ALWAYS at higher ranks do not exist, because there is one token; they have a
rate to keep the table rectangular.
"""
EARLIER_CONVERSATIONS: Final = tuple(rate for row in _EARLIER for rate in row)
"""The same for repetitions of the other of those conversations, which are about other topics."""


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


class Agreement(IntEnum):
    """Whether the earlier occurrences of a match were followed by the same token."""

    ONCE = 0
    """One occurrence."""
    ALWAYS = 1
    """Several occurrences, all followed by the same token."""
    MOSTLY = 2
    """Several tokens; the first candidate followed more than half of the occurrences."""
    SPLIT = 3
    """Several tokens; the first candidate did not follow more than half of the occurrences."""


def bucket(length: int, agreement: Agreement, rank: int) -> int:
    """The evidence bucket of a candidate.

    Args:
        length: number of tokens of the match, at least 1; the classes are 1, 2, 3, 4, 5 to 6, 7 to 9, 10 to 15, 16 to
            31, and 32 or more.
        agreement: agreement of the occurrences of the match.
        rank: 0 for the best candidate at this place; all others share a bucket.
    """
    return _CLASS_OF[min(length, _LONGEST)] * 8 + agreement * 2 + (rank > 0)
