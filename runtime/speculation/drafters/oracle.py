"""Drafters that are handed their guesses: whole trees from outside, and a text known beforehand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Protocol

from ..tree import Source, Tree
from .interface import Candidate

_CLASSES: Final = 8


class TreeProposer(Protocol):
    """Proposes whole drafts."""

    def propose(self, text: Sequence[int], most: int) -> Tree | None:
        """A tree over the text's last token with paths of at most `most` tokens, or nothing.

        Its path probabilities are claims: what they are worth is learned.
        """


class TreeDrafter:
    """A `Drafter` that passes on what a `TreeProposer` proposes. Its state is a node of the proposed tree."""

    source: Final = Source.OTHER
    prior: Final[Sequence[float]] = tuple((step + 0.5) / _CLASSES for step in range(_CLASSES))

    def __init__(self, drafter: TreeProposer, most: int = 16) -> None:
        self._drafter = drafter
        self._most = most
        self._text: list[int] = []
        self._tree: Tree | None = None
        self._following: dict[int, list[Candidate]] = {}

    def follow(self, tokens: Sequence[int]) -> None:
        """Make `tokens` the text."""
        self._text = list(tokens)

    def append(self, token: int) -> None:
        """Let the text grow by one token."""
        self._text.append(token)

    def state(self) -> int | None:
        """The anchor of a new proposal; None without one."""
        self._tree = tree = self._drafter.propose(self._text, self._most)
        self._following = {}
        if tree is None:
            return None
        for node in range(1, len(tree)):
            parent = int(tree.parents[node])
            claim = float(tree.path_prob[node]) / max(float(tree.path_prob[parent]), 1e-6)
            # What is no share of anything, or no number, claims nothing.
            step = min(int(claim * _CLASSES), _CLASSES - 1) if 0 <= claim < math.inf else 0
            candidate = Candidate(int(tree.tokens[node]), step)
            self._following.setdefault(parent, []).append(candidate)
        for candidates in self._following.values():
            candidates.sort(key=lambda candidate: -candidate.bucket)
        return 0

    def after(self, state: int | None, token: int) -> int | None:
        """The node's child."""
        return None if state is None or self._tree is None else self._tree.child(state, token)

    def candidates(self, state: int | None) -> Sequence[Candidate]:
        """The node's children, likeliest first."""
        return () if state is None else self._following.get(state, ())


class OracleDrafter:
    """A `Drafter` that knows the answer: the ceiling for all others. Its state is a place in the answer."""

    source: Final = Source.OTHER
    prior: Final[Sequence[float]] = (0.995,)

    def __init__(self, answer: Sequence[int] = (), start: int = 0) -> None:
        self._place = 0
        self.expect(answer, start)

    def expect(self, answer: Sequence[int], start: int) -> None:
        """Foresee `answer`, whose first token has index `start` in the text that is followed next."""
        self._answer = answer
        self._start = start

    def follow(self, tokens: Sequence[int]) -> None:
        """Make `tokens` the text."""
        self._place = len(tokens) - self._start

    def append(self, token: int) -> None:
        """Let the text grow by one token."""
        del token
        self._place += 1

    def state(self) -> int:
        """How much of the answer is written."""
        return self._place

    def after(self, state: int, token: int) -> int:
        """One place further."""
        del token
        return state + 1

    def candidates(self, state: int) -> Sequence[Candidate]:
        """The token at this place."""
        return [Candidate(self._answer[state], 0)] if 0 <= state < len(self._answer) else ()
