"""Several continuations of one text: a token tree that stays in the cache from one pass to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from ..graph.bound_graph import BoundGraph
from ..graph.graph_io import Floats
from ..prefill import Cancelled


class Forest:
    """Continuations of a text that is in the cache, whose nodes have the slots behind it; node 0 is its last token.

    Nodes of equal depth share a position, and each attends to its ancestors alone, as in the verification of a draft;
    here the nodes are committed, and the mask of a pass reaches back to all of them.

    Args:
        bound: the graph, which supports trees; its arena has the slots of the text, at least one.
        cancelled: called before every pass; True ends the search.

    Attributes:
        base: slot of node 0. The slots up to it belong to the text.
        passes: number of passes so far.
    """

    def __init__(self, bound: BoundGraph, cancelled: Callable[[], bool]) -> None:
        self._bound: Final = bound
        self._cancelled: Final = cancelled
        self.passes = 0
        self._begin(bound.arena.length - 1)

    def _begin(self, base: int) -> None:
        self.base = base
        self._depths = np.zeros(1, np.int64)
        self._ancestors = np.ones((1, 1), np.bool_)
        """bool `[n, n]`: whether node j is node i or an ancestor of it."""

    @property
    def size(self) -> int:
        """Number of nodes."""
        return len(self._depths)

    @property
    def room(self) -> int:
        """Number of nodes for which the context still has slots."""
        return self._bound.arena.limit - self._bound.arena.length

    def extend(self, parents: Sequence[int], tokens: Sequence[int]) -> Floats:
        """Add a node behind each of some nodes, in one pass; the new nodes are numbered behind the others.

        Returns:
            Logits float32 `[n, V]` after each new node, valid until the next pass.

        Raises:
            Cancelled: the caller cancelled.
            ContextError: the context has no slots for them.
        """
        if self._cancelled():
            raise Cancelled
        new = len(tokens)
        depths = self._depths[list(parents)] + 1
        mask = np.hstack([self._ancestors[list(parents)], np.eye(new, dtype=np.bool_)])
        # A chain needs no mask, which most graphs run faster.
        tree_mask = None if new == 1 and mask.all() else mask
        logits = self._bound.forward(tokens, positions=self.base + depths, tree_mask=tree_mask)
        self._bound.arena.commit(new)
        self.passes += 1
        self._depths = np.concatenate([self._depths, depths])
        self._ancestors = np.vstack([np.pad(self._ancestors, ((0, 0), (0, new))), mask])
        return logits

    def states(self) -> Floats:
        """Hidden states float32 `[n, d]` of the text and of the nodes, in a new array; the arena must keep them."""
        arena = self._bound.arena
        if arena.features is None:
            raise ValueError("the cache was made without hidden states")
        return arena.features.read(0, arena.length).copy()

    def keep(self, nodes: Sequence[int]) -> list[int]:
        """Drop all nodes but some and their ancestors, and free their slots; returns the new numbers of `nodes`."""
        alive = np.flatnonzero(self._ancestors[list(nodes)].any(axis=0))
        if alive.size < len(self._depths):
            arena = self._bound.arena
            arena.rewind_to(self.base)
            arena.compact(self.base, alive.tolist())
            self._depths = self._depths[alive]
            self._ancestors = self._ancestors[np.ix_(alive, alive)]
        return [int(index) for index in np.searchsorted(alive, nodes)]

    def settle(self, node: int) -> None:
        """Make the path to a node part of the text, and drop all others; it is node 0 from now on."""
        self.keep([node])
        self._begin(self.base + len(self._depths) - 1)
