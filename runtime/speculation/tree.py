"""A token tree: the anchor and the guesses that are verified with it in one pass.

Node 0 is the anchor, the last token of the text, whose cache row is not computed yet. Parents come before their
children, siblings carry different tokens, so a path of accepted nodes is unambiguous. Trees are small (a pass over more
than a few dozen rows never pays on a machine bound by memory), and frozen.
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
    """Who guessed a token."""

    ANCHOR = 0
    """Nobody: it is the text's own last token."""
    SUFFIX = 1
    """A repetition within the conversation."""
    HISTORY = 2
    """A repetition of an earlier conversation."""
    NGRAM = 3
    """Counts of short token sequences."""
    RECYCLED = 4
    """What the target last thought would follow the token."""
    MODEL = 5
    """A draft model."""
    OTHER = 6
    """A drafter from outside."""


@dataclass(frozen=True)
class Tree:
    """`n` nodes; see the module's text for the order."""

    tokens: Int32
    """int32 `[n]`."""
    parents: Int32
    """int32 `[n]`; the anchor's is -1."""
    path_prob: npt.NDArray[np.float32]
    """float32 `[n]`: estimated probability that the node and all above it are accepted; the anchor's is 1."""
    source: npt.NDArray[np.uint8]
    """uint8 `[n]`: the `Source` of each node."""

    @classmethod
    def of(
        cls, tokens: Sequence[int], parents: Sequence[int], path_prob: Sequence[float], source: Sequence[int]
    ) -> Tree:
        """A tree from plain sequences.

        Raises:
            ValueError: lengths differ, a parent does not come before its child, or siblings share a token.
        """
        if not len(tokens) == len(parents) == len(path_prob) == len(source) or not tokens:
            raise ValueError("a tree needs a token, a parent, a probability and a source for every node")
        if parents[0] != -1 or any(not 0 <= parent < node for node, parent in enumerate(parents) if node):
            raise ValueError(f"parents {list(parents)} do not come before their children")
        if len(set(zip(parents, tokens, strict=True))) != len(tokens):
            raise ValueError("siblings carry the same token")
        return cls(
            np.array(tokens, np.int32),
            np.array(parents, np.int32),
            np.array(path_prob, np.float32),
            np.array(source, np.uint8),
        )

    @classmethod
    def anchor_only(cls, anchor: int) -> Tree:
        """The tree of a plain step."""
        return cls.of([anchor], [-1], [1.0], [Source.ANCHOR])

    @classmethod
    def chain(cls, anchor: int, tokens: Sequence[int], path_prob: Sequence[float], source: Source) -> Tree:
        """A single path."""
        return cls.of(
            [anchor, *tokens],
            range(-1, len(tokens)),
            [1.0, *path_prob],
            [Source.ANCHOR, *[source] * len(tokens)],
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node is the child of the node before it."""
        return bool((self.parents == np.arange(-1, len(self) - 1)).all())

    @cached_property
    def depths(self) -> Int32:
        """int32 `[n]`: steps from the anchor, whose depth is 0; a node's position is the anchor's plus this."""
        depths = np.zeros(len(self), np.int32)
        for node in range(1, len(self)):
            depths[node] = depths[self.parents[node]] + 1
        return depths

    @cached_property
    def mask(self) -> npt.NDArray[np.bool_]:
        """bool `[n, n]`: row i sees its ancestors and itself."""
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
        """The child of `node` that carries `token`."""
        return self._children.get((node, token))

    def first(self, nodes: int) -> Tree:
        """The tree of the first `nodes` nodes, at least 1; it shares their arrays."""
        return Tree(self.tokens[:nodes], self.parents[:nodes], self.path_prob[:nodes], self.source[:nodes])

    def kept(self, nodes: Iterable[int]) -> Tree:
        """The tree of some of the nodes, in their order here.

        Raises:
            ValueError: the anchor or a kept node's parent is not among them.
        """
        order = sorted(set(nodes))
        new_index = {old: new for new, old in enumerate(order)}
        parents = self.parents.tolist()
        if order[:1] != [0] or any(parents[node] not in new_index for node in order[1:]):
            raise ValueError(f"nodes {order} do not hold their parents")
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


def merge(trees: Sequence[Tree]) -> Tree:
    """One tree with the nodes of several over the same anchor; a node in more than one keeps its likeliest estimate.

    Raises:
        ValueError: there is none, or their anchors differ.
    """
    if not trees or any(tree.tokens[0] != trees[0].tokens[0] for tree in trees):
        raise ValueError("only trees over the same anchor can be merged")
    tokens, parents = [int(trees[0].tokens[0])], [-1]
    path_prob, source = [1.0], [int(Source.ANCHOR)]
    where: dict[tuple[int, int], int] = {}
    for tree in trees:
        node_of = [0] * len(tree)
        for node in range(1, len(tree)):
            key = (node_of[tree.parents[node]], int(tree.tokens[node]))
            probability = float(tree.path_prob[node])
            if key not in where:
                where[key] = len(tokens)
                tokens.append(key[1])
                parents.append(key[0])
                path_prob.append(probability)
                source.append(int(tree.source[node]))
            elif probability > path_prob[where[key]]:
                path_prob[where[key]] = probability
                source[where[key]] = int(tree.source[node])
            node_of[node] = where[key]
    return Tree.of(tokens, parents, path_prob, source)
