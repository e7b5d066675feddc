"""What samples of a prompt have shown of the probability that a text goes on as a grammar allows.

Source: adaptive sampling with approximate expected futures (Park et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(eq=False)
class _Prefix:
    """What is known of the answers with a beginning."""

    expected: float = 1.0
    """Upper bound of the probability that the model goes on as the grammar allows."""
    mass: float | None = None
    """Probability of the tokens that may come next; None if no sample has come here."""
    following: dict[int, tuple[float, _Prefix]] = field(default_factory=dict)
    """The tokens that samples went on with, and their probabilities under the model."""


class ExpectedFutures:
    """What samples of one prompt and grammar have shown, as a tree of their beginnings."""

    def __init__(self) -> None:
        self._path: list[_Prefix] = [_Prefix()]

    def begin(self, tokens: Sequence[int] = ()) -> None:
        """Begin a sample, which has some tokens already."""
        del self._path[1:]
        self.observe(tokens)

    def observe(self, tokens: Sequence[int]) -> None:
        """Add tokens to the sample."""
        for token in tokens:
            known = self._path[-1].following.get(token)
            # Tokens that were not sampled have no part in what is expected.
            self._path.append(_Prefix() if known is None else known[1])

    def weigh(self, ids: npt.NDArray[np.intp], probabilities: npt.NDArray[np.float64]) -> None:
        """Multiply the probabilities of the tokens that may come by what is expected after them.

        Args:
            ids: the tokens, ascending, `[k]`.
            probabilities: their probabilities under the model, float64 `[k]`; changed in place.
        """
        here = self._path[-1]
        here.mass = min(float(probabilities.sum()), 1.0)
        for token, (_, prefix) in here.following.items():
            probabilities[np.searchsorted(ids, token)] *= prefix.expected

    def chosen(self, token: int, probability: float) -> None:
        """Note that the sample goes on with a token of a probability under the model."""
        self._path[-1].following.setdefault(token, (probability, _Prefix()))

    def dead_end(self) -> None:
        """Note that the sample cannot go on."""
        self._path[-1].mass = 0.0

    def finish(self) -> None:
        """End the sample, and update what is expected after each of its beginnings."""
        for prefix in reversed(self._path):
            if prefix.mass is not None:
                lost = sum(probability * (1 - after.expected) for probability, after in prefix.following.values())
                prefix.expected = max(prefix.mass - lost, 0.0)
