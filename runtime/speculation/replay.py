"""Answering with a recorded text: what benchmarks use to measure real acceptance at the full cost of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ..sampling import Logits
from .verification import TokenSampler


class OracleMode(Enum):
    """What takes the drafters' place while a recording is replayed."""

    NONE = "none"
    """Nothing: they draft as always."""
    RIGHT = "right"
    """A drafter that knows the answer: what no other can surpass."""
    WRONG = "wrong"
    """A drafter that is sure of itself and never right: what the worst one costs."""


@dataclass(frozen=True)
class Recording:
    """An answer given beforehand, and whether drafts are to know it."""

    answer: tuple[int, ...]
    oracle_mode: OracleMode = OracleMode.NONE

    def believed(self, vocab_size: int) -> tuple[int, ...]:
        """The answer that the drafter expects."""
        if self.oracle_mode is OracleMode.RIGHT:
            return self.answer
        return tuple((token + 1) % vocab_size for token in self.answer)


class ReplaySampler:
    """Does all of another chooser's work, then gives the recorded token of the position instead.

    Every pass over the weights and every choice costs what it really costs, while guesses are accepted as they would
    have been when the answer was made. Nothing about the graph's own text is learned this way.
    """

    def __init__(self, answer: Sequence[int], start: int, chooser: TokenSampler) -> None:
        """Replay `answer`, whose first token has index `start` in the text."""
        self._answer = answer
        self._start = start
        self._chooser = chooser

    def choose(self, logits: Logits, position: int) -> int:
        """The recorded token at `position`.

        Raises:
            IndexError: the answer has no such position.
        """
        self._chooser.choose(logits, position)
        index = position - self._start
        if not 0 <= index < len(self._answer):
            raise IndexError(f"the answer spans {self._start} to {self._start + len(self._answer) - 1}, not {position}")
        return self._answer[index]

    def observe(self, tokens: Sequence[int]) -> None:
        """Add tokens to the context of the other chooser's choices."""
        self._chooser.observe(tokens)
