"""Token trees: the anchor and the draft tokens that are verified with it in one pass.

Node 0 is the anchor, the last token of the sequence, which has no cache slot yet. Parents come before their children,
and siblings carry different tokens, so a path of accepted nodes is unambiguous. Trees are small (a pass over more than
a few dozen tokens never pays on a memory-bound machine) and frozen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int32: TypeAlias = npt.NDArray[np.int32]


class Source(IntEnum):
    """Where a draft token comes from."""

    ANCHOR = 0
    """Not a draft token: the last token of the sequence."""
    SUFFIX = 1
    """A repetition within the conversation."""
    HISTORY = 2
    """A repetition of an earlier conversation."""
    NGRAM = 3
    """Counts of short token sequences."""
    RECYCLED = 4
    """The highest logits of the target when the token occurred before."""
    MODEL = 5
    """A draft model."""
    OTHER = 6
    """An oracle drafter, or one from outside edge-run."""


@dataclass(frozen=True)
class Tree:
    """A tree of `n` nodes; see the module docstring for their order."""

    tokens: Int32
    """int32 `[n]`: the token id of each node."""
    parents: Int32
    """int32 `[n]`: the parent of each node; -1 for the anchor."""
    path_prob: npt.NDArray[np.float32]
    """float32 `[n]`: estimated probability that the node and its ancestors are accepted; 1 for the anchor."""
    source: npt.NDArray[np.uint8]
    """uint8 `[n]`: the `Source` of each node."""

    @classmethod
    def of(
        cls, tokens: Sequence[int], parents: Sequence[int], path_prob: Sequence[float], source: Sequence[int]
    ) -> Tree:
        """Make a tree from plain sequences.

        Raises:
            ValueError: lengths differ, a parent does not come before its child, or siblings share a token.
        """
        if not len(tokens) == len(parents) == len(path_prob) == len(source) or not tokens:
            raise ValueError("a tree needs a token, a parent, a probability and a source for every node")
        if parents[0] != -1 or any(not 0 <= parent < node for node, parent in enumerate(parents) if node):
            raise ValueError(f"parents {list(parents)} do not come before their children")
        if len(set(zip(parents, tokens, strict=True))) != len(tokens):
            raise ValueError("siblings have the same token")
        return cls(
            np.array(tokens, np.int32),
            np.array(parents, np.int32),
            np.array(path_prob, np.float32),
            np.array(source, np.uint8),
        )

    @classmethod
    def anchor_only(cls, anchor: int) -> Tree:
        """The tree of a plain step: no draft tokens."""
        return cls.of([anchor], [-1], [1.0], [Source.ANCHOR])

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node is the child of the node before it."""
        return bool((self.parents == np.arange(-1, len(self) - 1)).all())

    @cached_property
    def depths(self) -> Int32:
        """int32 `[n]`: distance from the anchor. The position of a node is the anchor's plus its depth."""
        depths = np.zeros(len(self), np.int32)
        for node in range(1, len(self)):
            depths[node] = depths[self.parents[node]] + 1
        return depths

    @cached_property
    def mask(self) -> npt.NDArray[np.bool_]:
        """bool `[n, n]`: row i is True for node i and its ancestors."""
        mask = np.eye(len(self), dtype=np.bool_)
        for node in range(1, len(self)):
            mask[node] |= mask[self.parents[node]]
        return mask

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        return {
            (parent, token): node
            for node, (parent, token) in enumerate(zip(self.parents.tolist(), self.tokens.tolist(), strict=True))
        }

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that carries `token`; None if there is none."""
        return self._children.get((node, token))

    def first(self, nodes: int) -> Tree:
        """The tree of the first `nodes` nodes, at least 1; it shares this tree's arrays."""
        return Tree(self.tokens[:nodes], self.parents[:nodes], self.path_prob[:nodes], self.source[:nodes])

    def kept(self, nodes: Iterable[int]) -> Tree:
        """The tree of some of the nodes, in the same order.

        Raises:
            ValueError: the anchor or a kept node's parent is not among them.
        """
        order = sorted(set(nodes))
        new_index = {old: new for new, old in enumerate(order)}
        parents = self.parents.tolist()
        if order[:1] != [0] or any(parents[node] not in new_index for node in order[1:]):
            raise ValueError(f"nodes {order} lack the anchor or the parent of a node")
        return Tree(
            self.tokens[order],
            np.array([-1, *(new_index[parents[node]] for node in order[1:])], np.int32),
            self.path_prob[order],
            self.source[order],
        )

    def path_to(self, node: int) -> tuple[int, ...]:
        """The nodes from the anchor to `node`."""
        path = [node]
        while path[-1] > 0:
            path.append(int(self.parents[path[-1]]))
        return tuple(reversed(path))
