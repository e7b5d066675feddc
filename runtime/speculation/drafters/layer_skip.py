"""A draft that is the target without some of its parts, over the target's own cache.

The target has read the text already: its rows are more than as good as the draft's own would be. So nothing has to be
caught up; a round costs the draft a pass for the last token and one for each guess further. Where a guess comes true,
the row it has is not kept, because the pass that verified it has written a better one over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...graph.bound_session import BoundSession
from ...kv.arena import InPlaceArena, KVArena
from ...kv.borrowed import BorrowedArena
from ..pass_cost import PassCost
from .draft_model import DraftModel, Int32


class LayerSkipDraft(DraftModel):
    """A `DraftModel` without rows of its own. `attach` says of which text's arena it takes them.

    Args:
        bound: its session, over a `BorrowedArena`.
        cost: as for `DraftModel`.
        target_vocab: as for `DraftModel`.
        target_ids: as for `DraftModel`.
    """

    def __init__(self, bound: BoundSession, cost: PassCost, target_vocab: int, target_ids: Int32 | None = None) -> None:
        super().__init__(bound, cost, target_vocab, target_ids)
        if not isinstance(bound.arena, BorrowedArena):
            raise TypeError("a draft over the target's cache needs a borrowed arena")
        self._borrowed: Final = bound.arena
        self._behind = True

    def attach(self, arena: KVArena) -> None:
        """Take the rows of the target's `arena`, in which the text is being written from now on."""
        if not isinstance(arena, InPlaceArena):
            raise TypeError("only a cache in place can be borrowed from")
        self._borrowed.borrow(arena)
        self._behind = True

    def follow(self, tokens: Sequence[int]) -> None:
        """Make `tokens` the text."""
        self._text = list(tokens)
        self._behind = True

    def append(self, token: int) -> None:
        """Let the text grow by one token."""
        super().append(token)
        self._behind = True

    def _settle(self) -> None:
        """Now that the text has grown: begin anew behind the rows that the target has of it."""
        if self._behind:
            self._forget_guesses()
            self._borrowed.sync_length(len(self._text) - 1)
            self._behind = False
