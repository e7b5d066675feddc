"""A draft model made of part of the target's layers, over the target's own KV cache.

The target has prefilled the sequence already, and its cache slots are at least as good as the draft model's own would
be. So the draft model needs no prefill; a round costs it one pass for the last token and one for each further draft
token. Slots of accepted draft tokens are not kept: the pass that verified them has overwritten them with the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...graph.bound_graph import BoundGraph
from ...kv.arena import InPlaceArena, KVArena
from ...kv.borrowed import BorrowedArena
from ..pass_cost import PassCost
from .draft_model import DraftModel, Int32


class LayerSkipDraft(DraftModel):
    """A `DraftModel` without cache slots of its own; `attach` sets the arena that it borrows.

    Args:
        bound: session of the model, over a `BorrowedArena`.
        cost: as for `DraftModel`.
        target_vocab: as for `DraftModel`.
        target_ids: as for `DraftModel`.
    """

    def __init__(self, bound: BoundGraph, cost: PassCost, target_vocab: int, target_ids: Int32 | None = None) -> None:
        super().__init__(bound, cost, target_vocab, target_ids)
        if not isinstance(bound.arena, BorrowedArena):
            raise TypeError("a draft over the target's cache needs a borrowed arena")
        self._borrowed: Final = bound.arena
        self._stale = True
        """Whether the sequence has changed since the borrowed arena's length was set."""

    def attach(self, arena: KVArena) -> None:
        """Borrow the slots of the target's `arena`, which holds the sequence from now on."""
        if not isinstance(arena, InPlaceArena):
            raise TypeError("only a cache in place can be borrowed from")
        self._borrowed.borrow(arena)
        self._stale = True

    def reset(self, token_ids: Sequence[int]) -> None:
        """Replace the sequence."""
        self._token_ids = list(token_ids)
        self._stale = True

    def append(self, token: int) -> None:
        """Append a token to the sequence."""
        super().append(token)
        self._stale = True

    def _commit_accepted(self) -> None:
        """Continue behind the slots that the target has of the sequence."""
        if self._stale:
            self._drop_draft()
            self._borrowed.sync_length(len(self._token_ids) - 1)
            self._stale = False
