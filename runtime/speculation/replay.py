"""Recorded answers for benchmarks: replays their tokens, with or without oracle drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ..sampling.sampler import Logits
from .verification import TokenSampler


class OracleMode(Enum):
    """Which drafter replaces the usual drafters while a recorded answer is replayed."""

    NONE = "none"
    """The usual drafters are used."""
    RIGHT = "right"
    """The oracle drafter: it drafts the recorded answer, an upper bound for every drafter."""
    WRONG = "wrong"
    """The always-wrong drafter: confident and never right, the cost of the worst drafter."""


@dataclass(frozen=True)
class Recording:
    """A recorded answer to replay."""

    answer: tuple[int, ...]
    """Token ids of the answer."""
    oracle_mode: OracleMode = OracleMode.NONE
    """Which drafter replaces the usual ones."""

    def oracle_draft(self, vocab_size: int) -> tuple[int, ...]:
        """The tokens that the oracle or always-wrong drafter proposes, one for each of the answer."""
        if self.oracle_mode is OracleMode.RIGHT:
            return self.answer
        return tuple((token + 1) % vocab_size for token in self.answer)


class ReplaySampler:
    """Runs another sampler, then returns the recorded token of the position instead of its choice.

    Every forward pass and every choice costs what it really costs, while draft tokens are accepted as they would have
    been when the answer was recorded.

    Args:
        answer: token ids to return.
        start: index of the first of them in the sequence: the length of the prompt.
        sampler: the sampler to run.
    """

    def __init__(self, answer: Sequence[int], start: int, sampler: TokenSampler) -> None:
        self._answer = answer
        self._start = start
        self._sampler = sampler

    def choose(self, logits: Logits, position: int) -> int:
        """The recorded token at `position`.

        Raises:
            IndexError: the answer has no such position.
        """
        self._sampler.choose(logits, position)
        index = position - self._start
        if not 0 <= index < len(self._answer):
            last = self._start + len(self._answer) - 1
            raise IndexError(f"position {position} is outside the recorded answer ({self._start} to {last})")
        return self._answer[index]

    def observe_prompt(self, tokens: Sequence[int]) -> None:
        """Add tokens of the prompt to the other sampler's sequence."""
        self._sampler.observe_prompt(tokens)

    def observe(self, tokens: Sequence[int]) -> None:
        """Add tokens to the other sampler's sequence."""
        self._sampler.observe(tokens)
