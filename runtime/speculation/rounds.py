"""What a round of speculation drafted, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .draft_ahead import NOTHING_AHEAD, PassesAhead
from .growth import TreeGrowth
from .tree import Source, Tree


@dataclass
class Round:
    """A draft, and what came of it. Counts are computed on access, not between two passes."""

    tree: Tree
    """The tree that is verified."""
    growth: TreeGrowth | None = None
    """How it was grown; None without drafters, and once the outcome is known."""
    grown: Tree | None = None
    """The tree before pruning, if it was grown."""
    expected_tokens: float = 1.0
    """Number of tokens the round is expected to produce; 1 for a plain step."""
    advantage: float = 0.0
    """Tokens expected beyond those that plain decoding would produce in the same time."""
    draft_passes: int = 0
    draft_s: float = 0.0
    """Seconds of the draft model, without those in which it ran ahead."""
    host_s: float = 0.0
    """Seconds spent on lookups, choosing tokens and learning."""
    ahead: PassesAhead = NOTHING_AHEAD
    """What the draft model ran ahead, while the target verified the draft before this one."""
    note: str = ""
    """Reason why nothing was drafted, or why the round took longer; may be empty."""
    accepted_path: tuple[int, ...] = (0,)
    """Accepted nodes of `tree`, the anchor first."""
    target_s: float = 0.0
    """Seconds of the target's passes, those included that recomputed near ties."""

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
        return _by_source((self.tree if self.grown is None else self.grown).source[1:])

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


def _by_source(sources: npt.NDArray[np.uint8]) -> tuple[int, ...]:
    return tuple(np.bincount(sources, minlength=len(Source)).tolist())
