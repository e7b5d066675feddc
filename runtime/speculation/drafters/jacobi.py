"""Jacobi decoding: what the target said behind rejected draft tokens, drafted for the next pass (Song et al. 2021).

A pass gives a next token at every position, behind a wrong draft token too. That one is a prediction, and may be right
all the same: passes whose predictions are those of the pass before converge to the text of ordinary decoding
("Accelerating feedforward computation via parallel nonlinear equation solving"; for text Santilli et al. 2023, arXiv
2305.10427). Few are right, so they are worth positions that cost next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Final

from ..tree import Source
from .interface import Candidate, Drafter

_WINDOW: Final = 16
"""Number of positions that are predicted."""
_OFF: Final = -1
"""State behind a token that was not predicted."""


class JacobiDrafter(Drafter):
    """A `Drafter` of the target's own predictions. Its buckets: none yet; a new one; the same one as before."""

    source = Source.JACOBI
    prior = (0.05, 0.1, 0.3)
    logits_needed = 1
    reads_rejected = True

    def __init__(self) -> None:
        self._last = 0
        self._predictions: list[Candidate] = []
        self._verified = 0
        """Number of tokens that are about to be appended and that the predictions come behind."""

    def reset(self, token_ids: Sequence[int]) -> None:
        """Replace the sequence; nothing is predicted yet."""
        self._last, self._predictions, self._verified = (token_ids[-1] if token_ids else 0), [], 0

    def append(self, token: int) -> None:
        """Append a token to the sequence."""
        self._last = token
        if self._verified:
            self._verified -= 1
        else:
            self._predictions = self._predictions[1:]

    def state(self) -> int:
        """The number of tokens behind the sequence: none."""
        return 0

    def after(self, state: int, token: int) -> int:
        """One token more, as long as they are those that were predicted."""
        return state + 1 if state != _OFF and token == self._at(state).token else _OFF

    def candidates(self, state: int) -> Sequence[Candidate]:
        """The prediction for the next token; where there is none, the last token of the sequence, to begin with."""
        return (self._at(state),) if 0 <= state < _WINDOW else ()

    def learn_rejected(self, tokens: Sequence[int], emitted: int) -> None:
        """Predict the target's tokens behind the rejected ones."""
        pairs = zip_longest(tokens, self._predictions[emitted:][: len(tokens)])
        self._predictions = [Candidate(token, 1 + (old is not None and old.token == token)) for token, old in pairs]
        self._verified = emitted

    def _at(self, state: int) -> Candidate:
        return self._predictions[state] if state < len(self._predictions) else Candidate(self._last, 0)
