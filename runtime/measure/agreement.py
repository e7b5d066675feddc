"""How often a draft model would choose the token that the target chooses, over a text and without anything pruned."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.bound_session import BoundSession
from ..speculation.drafters.draft_model import DraftModel
from ..speculation.drafters.layer_skip import LayerSkipDraft


def agreeing(bound: BoundSession, draft: DraftModel, text: Sequence[int], start: int = 0) -> int:
    """Count the tokens of a text, from number `start` on, after which target and draft prefer the same next one.

    Both read the text token by token, as in decoding: a draft on the target's cache finds the target's rows there, and
    leaves a row that the target writes over.

    Args:
        bound: the target's session; what its arena holds is lost.
        draft: the draft model.
        text: token ids, at most as many as the arena can have rows.
        start: tokens before it are only read.

    Raises:
        EdgeError: ONNX Runtime failed.
    """
    arena = bound.arena
    arena.rewind_to(0)
    if isinstance(draft, LayerSkipDraft):
        draft.attach(arena)
    draft.follow(())
    same = 0
    for place, token in enumerate(text):
        draft.append(token)
        preferred = draft.likely((), 1).tokens if place >= start else ()
        logits = bound.forward((token,))[0]
        arena.commit(1)
        same += preferred == (int(logits.argmax()),)
    return same
