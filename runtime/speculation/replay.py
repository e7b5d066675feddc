"""Recorded answers and drafts from outside, for benchmarks and checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..sampling.logit_stage import Logits
from ..sampling.sampler import Sampler
from .drafters.interface import Candidate, Drafter
from .tree import Source


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


class ReplaySampler(Sampler):
    """A `Sampler` that returns the recorded token of the position instead of its choice.

    Every forward pass and every choice costs what it really costs, while draft tokens are accepted as they would have
    been when the answer was recorded.

    Args:
        answer: token ids to return.
        start: index of the first of them in the sequence: the length of the prompt.
        sampler: arguments of `Sampler`.
    """

    def __init__(self, answer: Sequence[int], start: int, *sampler: Any) -> None:
        super().__init__(*sampler)
        self._answer = answer
        self._start = start

    def choose(self, logits: Logits, position: int) -> int:
        """The recorded token at `position`."""
        super().choose(logits, position)
        return self._answer[position - self._start]


class OracleDrafter(Drafter):
    """A `Drafter` that proposes the tokens of a known answer, an upper bound for every drafter.

    Its state is an index into the answer.

    Args:
        answer: the tokens to propose.
        start: index of the first of them in the sequence.
    """

    source = Source.OTHER
    prior = (0.995,)

    def __init__(self, answer: Sequence[int] = (), start: int = 0) -> None:
        self._index = 0
        self.set_answer(answer, start)

    def set_answer(self, answer: Sequence[int], start: int) -> None:
        """Propose `answer`, whose first token has index `start` in the sequence that is set next."""
        self._answer = answer
        self._start = start

    def reset(self, token_ids: Sequence[int]) -> None:
        """Replace the sequence."""
        self._index = len(token_ids) - self._start

    def append(self, token: int) -> None:
        """Append a token to the sequence."""
        del token
        self._index += 1

    def state(self) -> int:
        """Number of tokens of the answer that the sequence has."""
        return self._index

    def after(self, state: int, token: int) -> int:
        """The next index."""
        del token
        return state + 1

    def candidates(self, state: int) -> Sequence[Candidate]:
        """The answer's token at this index."""
        return [Candidate(self._answer[state], 0)] if 0 <= state < len(self._answer) else ()
