"""What a round of speculation drafted, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .draft_ahead import NOTHING_AHEAD, PassesAhead
from .growth import TreeGrowth
from .tree import Source, Tree


class Round(NamedTuple):
    """Statistics of one round. Counts are computed on access, not between two passes."""

    tree: Tree
    """The tree that was verified."""
    grown: Tree
    """The tree before pruning."""
    accepted_path: tuple[int, ...]
    """Accepted nodes of `tree`, the anchor first."""
    expected_tokens: float
    """Number of tokens the round was expected to produce; 1 for a plain step."""
    draft_passes: int
    draft_s: float
    """Seconds of the draft model, without those in which it ran ahead."""
    target_s: float
    host_s: float
    """Seconds spent on lookups, choosing tokens and learning."""
    ahead: PassesAhead = NOTHING_AHEAD
    """What the draft model ran ahead, while the target verified the draft before this one."""
    note: str = ""
    """Reason why nothing was drafted, or why the round took longer; may be empty."""

    @property
    def width(self) -> int:
        """Number of token positions of the target pass, the anchor's included."""
        return len(self.tree)

    @property
    def emitted(self) -> int:
        """Number of tokens the round produced."""
        return len(self.accepted_path)

    @property
    def candidates(self) -> tuple[int, ...]:
        """Number of nodes before pruning, by `Source`."""
        return _by_source(self.grown.source[1:])

    @property
    def drafted(self) -> tuple[int, ...]:
        """Number of draft tokens that were verified, by `Source`."""
        return _by_source(self.tree.source[1:])

    @property
    def accepted(self) -> tuple[int, ...]:
        """Number of draft tokens that were accepted, by `Source`."""
        return _by_source(self.tree.source[list(self.accepted_path[1:])])

    @property
    def drafted_by_depth(self) -> tuple[int, ...]:
        """Number of draft tokens that were verified, by depth; entry 0 is depth 1."""
        return tuple(np.bincount(self.tree.depths)[1:].tolist())


class RoundTiming(NamedTuple):
    """Seconds that a round took apart from drafting."""

    target_s: float
    """The pass over the draft."""
    recompute_s: float = 0.0
    """Passes that recomputed near ties, one token at a time."""
    verify_s: float = 0.0
    """Choosing tokens, and keeping the cache slots of the accepted path."""


@dataclass
class Draft:
    """A pruned draft tree and how it was made."""

    tree: Tree
    growth: TreeGrowth | None = None
    expected_tokens: float = 1.0
    advantage: float = 0.0
    """Tokens expected beyond those that plain decoding would produce in the same time."""
    draft_s: float = 0.0
    host_s: float = 0.0
    draft_passes: int = 0
    ahead: PassesAhead = NOTHING_AHEAD
    note: str = ""


def _by_source(sources: npt.NDArray[np.uint8]) -> tuple[int, ...]:
    return tuple(np.bincount(sources, minlength=len(Source)).tolist())
