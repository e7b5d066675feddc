"""Messages that ask for nothing that a model for shell commands can do."""

from __future__ import annotations

import re
from typing import Final

_SMALL_TALK: Final = re.compile(
    r"(hi+|hello|hey|yo|thanks?|thank you|good (morning|evening|night|day)|bye|ok(ay)?|please|help|test(ing)?|"
    r"(how|who|what) are you|what can you do|what is this|tell me .*|why .*|write .* (poem|story|essay).*)"
    r"( there| you| edge-run| all)?[\s.!?]*",
    re.IGNORECASE,
)


def is_small_talk(text: str) -> bool:
    """Whether a message asks for nothing that a model for shell commands can do."""
    return _SMALL_TALK.fullmatch(text.strip()) is not None
