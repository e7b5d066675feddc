"""Drafters whose drafts come from outside: recorded answers, and whole trees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Protocol

from ..tree import Source, Tree
from .interface import Candidate

_CLASSES: Final = 8
"""Evidence buckets of a proposed tree: classes of the probability it states for a node given its parent."""


class TreeProposer(Protocol):
    """Proposes whole draft trees."""

    def propose(self, token_ids: Sequence[int], max_depth: int) -> Tree | None:
        """A tree whose anchor is the last of `token_ids`, with paths of at most `max_depth` tokens, or None.

        Its path probabilities are taken as evidence; how reliable they are is learned.
        """


class TreeDrafter:
    """A `Drafter` that passes on the trees of a `TreeProposer`. Its state is a node of the proposed tree."""

    source: Final = Source.OTHER
    prior: Final[Sequence[float]] = tuple((step + 0.5) / _CLASSES for step in range(_CLASSES))

    def __init__(self, proposer: TreeProposer, max_depth: int = 16) -> None:
        self._proposer = proposer
        self._max_depth = max_depth
        self._token_ids: list[int] = []
        self._tree: Tree | None = None
        self._children: dict[int, list[Candidate]] = {}

    def reset(self, token_ids: Sequence[int]) -> None:
        """Replace the sequence."""
        self._token_ids = list(token_ids)

    def append(self, token: int) -> None:
        """Append a token to the sequence."""
        self._token_ids.append(token)

    def state(self) -> int | None:
        """The anchor of a new proposal; None without one."""
        self._tree = tree = self._proposer.propose(self._token_ids, self._max_depth)
        self._children = {}
        if tree is None:
            return None
        for node in range(1, len(tree)):
            parent = tree.parent_nodes[node]
            stated = tree.path_probs[node] / max(tree.path_probs[parent], 1e-6)
            # Values that are not probabilities, NaN among them, go into the lowest class.
            step = min(int(stated * _CLASSES), _CLASSES - 1) if 0 <= stated < math.inf else 0
            candidate = Candidate(tree.token_ids[node], step)
            self._children.setdefault(parent, []).append(candidate)
        for candidates in self._children.values():
            candidates.sort(key=lambda candidate: -candidate.bucket)
        return 0

    def after(self, state: int | None, token: int) -> int | None:
        """The child of the node with this token."""
        return None if state is None or self._tree is None else self._tree.child(state, token)

    def candidates(self, state: int | None) -> Sequence[Candidate]:
        """The children of the node, most probable first."""
        return () if state is None else self._children.get(state, ())


class OracleDrafter:
    """A `Drafter` that proposes the tokens of a known answer, an upper bound for every drafter.

    Its state is an index into the answer.

    Args:
        answer: the tokens to propose.
        start: index of the first of them in the sequence.
    """

    source: Final = Source.OTHER
    prior: Final[Sequence[float]] = (0.995,)

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
