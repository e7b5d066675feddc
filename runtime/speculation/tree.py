"""Token trees: the anchor and the draft tokens that are verified with it in one pass.

Node 0 is the anchor, the last token of the sequence, which has no cache slot yet. Parents come before their children,
and siblings carry different tokens, so a path of accepted nodes is unambiguous. Trees are small (a pass over more than
a few dozen tokens never pays on a memory-bound machine) and frozen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Int32: TypeAlias = npt.NDArray[np.int32]


class Source(IntEnum):
    """Where a draft token comes from."""

    ANCHOR = 0
    """Not a draft token: the last token of the sequence."""
    SUFFIX = 1
    """A repetition within the conversation."""
    EDIT = 2
    """The part of the conversation that is being rewritten."""
    HISTORY = 3
    """A repetition of an earlier conversation."""
    NGRAM = 4
    """Counts of short token sequences."""
    RECYCLE = 5
    """The highest logits of the target when the token occurred before."""
    MODEL = 6
    """A draft model."""
    EAGLE = 7
    """An EAGLE-3 head over the target's hidden states."""
    MEDUSA = 8
    """Medusa heads over the target's last hidden state."""
    MTP = 9
    """The multi-token-prediction module of the target."""
    SPARSE = 10
    """The target over a part of its cache."""
    JACOBI = 11
    """What the target said behind rejected draft tokens."""
    GRAMMAR = 12
    """The only token that the grammar of the answer allows."""
    OTHER = 13
    """An oracle drafter, or one from outside edge-run."""


class Tree:
    """A tree of `n` nodes; see the module docstring for their order.

    It is made of plain sequences, which are what a round needs: between two passes, the first call of each NumPy
    function takes as long as the rest of making a tree. Arrays are made when they are asked for.

    Args:
        tokens: the token id of each node.
        parents: the parent of each node; -1 for the anchor.
        path_prob: estimated probability that the node and its ancestors are accepted; 1 for the anchor.
        source: the `Source` of each node.

    Attributes:
        token_ids: `tokens`; `[n]`, like all others.
        parent_nodes: `parents`.
        path_probs: `path_prob`.
        sources: `source`.
    """

    def __init__(
        self, tokens: Sequence[int], parents: Sequence[int], path_prob: Sequence[float], source: Sequence[int]
    ) -> None:
        self.token_ids: Final = tokens
        self.parent_nodes: Final = parents
        self.path_probs: Final = path_prob
        self.sources: Final = source

    @classmethod
    def of(
        cls, tokens: Sequence[int], parents: Sequence[int], path_prob: Sequence[float], source: Sequence[int]
    ) -> Tree:
        """Make a tree of sequences that are checked.

        Raises:
            ValueError: lengths differ, a parent does not come before its child, or siblings share a token.
        """
        if not len(tokens) == len(parents) == len(path_prob) == len(source) or not tokens:
            raise ValueError("a tree needs a token, a parent, a probability and a source for every node")
        if parents[0] != -1 or any(not 0 <= parent < node for node, parent in enumerate(parents) if node):
            raise ValueError(f"parents {list(parents)} do not come before their children")
        if len(set(zip(parents, tokens, strict=True))) != len(tokens):
            raise ValueError("siblings have the same token")
        return cls(tuple(tokens), tuple(parents), tuple(path_prob), tuple(source))

    @classmethod
    def anchor_only(cls, anchor: int) -> Tree:
        """The tree of a plain step: no draft tokens."""
        return cls((anchor,), (-1,), (1.0,), (int(Source.ANCHOR),))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def tokens(self) -> Int32:
        """int32 `[n]`: the token id of each node."""
        return np.array(self.token_ids, np.int32)

    @property
    def parents(self) -> Int32:
        """int32 `[n]`: the parent of each node; -1 for the anchor."""
        return np.array(self.parent_nodes, np.int32)

    @property
    def path_prob(self) -> npt.NDArray[np.float32]:
        """float32 `[n]`: estimated probability that the node and its ancestors are accepted; 1 for the anchor."""
        return np.array(self.path_probs, np.float32)

    @property
    def source(self) -> npt.NDArray[np.uint8]:
        """uint8 `[n]`: the `Source` of each node."""
        return np.array(self.sources, np.uint8)

    @property
    def is_chain(self) -> bool:
        """Whether every node is the child of the node before it."""
        return all(parent == node - 1 for node, parent in enumerate(self.parent_nodes))

    def first_branch(self, node: int) -> list[int]:
        """The first child of a node, its first child, and so on."""
        found: list[int] = []
        while node in (behind := self.parent_nodes[node + 1 :]):
            node += 1 + list(behind).index(node)
            found.append(node)
        return found

    @property
    def depths(self) -> Int32:
        """int32 `[n]`: distance from the anchor. The position of a node is the anchor's plus its depth."""
        depths = [0]
        for parent in self.parent_nodes[1:]:
            depths.append(depths[parent] + 1)
        return np.array(depths, np.int32)

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """bool `[n, n]`: row i is True for node i and its ancestors."""
        mask = np.eye(len(self), dtype=np.bool_)
        for node in range(1, len(self)):
            mask[node] |= mask[self.parent_nodes[node]]
        return mask

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that carries `token`; None if there is none."""
        tokens, parents = self.token_ids, self.parent_nodes
        children = (child for child in range(node + 1, len(tokens)) if parents[child] == node)
        return next((child for child in children if tokens[child] == token), None)

    def kept(self, nodes: Iterable[int]) -> Tree:
        """The tree of some of the nodes, in the same order; the anchor and their parents must be among them."""
        order = sorted(set(nodes))
        new_index = {old: new for new, old in enumerate(order)}
        parents = self.parent_nodes
        return Tree(
            [self.token_ids[node] for node in order],
            [-1, *(new_index[parents[node]] for node in order[1:])],
            [self.path_probs[node] for node in order],
            [self.sources[node] for node in order],
        )

    def path_to(self, node: int) -> tuple[int, ...]:
        """The nodes from the anchor to `node`."""
        path = [node]
        while path[-1] > 0:
            path.append(self.parent_nodes[path[-1]])
        return tuple(reversed(path))
