"""What a round of speculation drafted, what came of it, and how its tokens came to be."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from .choice import SOURCE_NAMES
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


class OriginKind(StrEnum):
    """How a token came to be. Every pass of the model gives one token that is not `ACCEPTED`."""

    PREFILL = "prefill"
    """The first token, from the pass over the end of the prompt."""
    DECODED = "decoded"
    """From a pass without draft tokens."""
    ACCEPTED = "accepted"
    """A draft token that the model accepted."""
    CORRECTED = "corrected"
    """The model's own token, where all draft tokens were others."""
    BONUS = "bonus"
    """The model's own token behind the last accepted one, where there was no other draft token."""
    FILLED = "filled"
    """From a pass over a block of masked tokens."""


@dataclass(frozen=True)
class TokenOrigin:
    """How a token of an answer came to be."""

    kind: OriginKind
    drafter: str | None = None
    """Name of the drafter of an accepted token, or of the rejected one: one of `choice.SOURCE_NAMES`, or `other`."""
    rejected: str | None = None
    """Text of the draft token that the model rejected here, the most probable one if there were several."""
    block_pass: int | None = None
    """The pass over its block, from 1, that found a `FILLED` token."""
    rejected_id: int | None = None
    """Token id of the rejected draft token."""


def origins_of(report: Round, tokens: tuple[int, ...]) -> tuple[TokenOrigin, ...]:
    """How the tokens that a round emitted came to be.

    Args:
        report: statistics of the round.
        tokens: what it emitted: the accepted tokens, then the model's own.
    """
    tree, path = report.tree, report.accepted_path
    if len(tree) == 1:
        return (TokenOrigin(OriginKind.DECODED),)
    accepted = [TokenOrigin(OriginKind.ACCEPTED, SOURCE_NAMES[Source(tree.sources[node])]) for node in path[1:]]
    node, token = path[-1], tokens[-1]
    children = [child for child in range(node + 1, len(tree)) if tree.parent_nodes[child] == node]
    # At the largest length, and where a near tie was recomputed, a draft token that is the right one is not accepted.
    if not children or tree.child(node, token) is not None:
        return (*accepted, TokenOrigin(OriginKind.BONUS))
    rejected = max(children, key=lambda child: (tree.path_probs[child], -child))
    drafter = SOURCE_NAMES[Source(tree.sources[rejected])]
    return (*accepted, TokenOrigin(OriginKind.CORRECTED, drafter, rejected_id=tree.token_ids[rejected]))
