"""How the tokens of an answer came to be: drafted and accepted, or chosen by the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from .choice import SOURCE_NAMES
from .rounds import Round
from .tree import Source, Tree


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


@dataclass(frozen=True)
class TokenOrigin:
    """How a token of an answer came to be."""

    kind: OriginKind
    drafter: str | None = None
    """Name of the drafter of an accepted token, or of the rejected one: one of `choice.SOURCE_NAMES`, or `other`."""
    rejected: str | None = None
    """Text of the draft token that the model rejected here, the most probable one if there were several."""


class DraftOrigin(NamedTuple):
    """`TokenOrigin` in token ids."""

    kind: OriginKind
    source: Source | None = None
    rejected: int | None = None

    @property
    def drafter(self) -> str | None:
        """Name of the drafter; None if there is none."""
        return None if self.source is None else drafter_name(self.source)


def drafter_name(source: Source) -> str:
    """The user-visible name of a drafter, also of those from outside edge-run."""
    return SOURCE_NAMES.get(source, "other")


def origins_of(report: Round, tokens: tuple[int, ...]) -> tuple[DraftOrigin, ...]:
    """How the tokens that a round emitted came to be.

    Args:
        report: statistics of the round.
        tokens: what it emitted: the accepted tokens, then the model's own.
    """
    tree, path = report.tree, report.accepted_path
    if len(tree) == 1:
        return (DraftOrigin(OriginKind.DECODED),)
    accepted = [DraftOrigin(OriginKind.ACCEPTED, Source(tree.source[node])) for node in path[1:]]
    return (*accepted, _own(tree, path[-1], tokens[-1]))


def _own(tree: Tree, node: int, token: int) -> DraftOrigin:
    """How the model's own token behind a node came to be."""
    children = [child for child in range(node + 1, len(tree)) if tree.parent_nodes[child] == node]
    # At the largest length, and where a near tie was recomputed, a draft token that is the right one is not accepted.
    if not children or tree.child(node, token) is not None:
        return DraftOrigin(OriginKind.BONUS)
    rejected = max(children, key=lambda child: (tree.path_probs[child], -child))
    return DraftOrigin(OriginKind.CORRECTED, Source(tree.sources[rejected]), tree.token_ids[rejected])
