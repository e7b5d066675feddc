"""How reasoning stands in the text of an answer that is kept: first, in tags."""

from __future__ import annotations

import re
from typing import Final

_OPENING: Final = "<think>\n"
_CLOSING: Final = "\n</think>\n\n"
_WRITTEN: Final = re.compile(r"\s*<think(?:ing)?>(.*?)(?:</think(?:ing)?>\s*|\Z)", re.DOTALL)


class ReasoningText:
    """Writes the parts of an answer as one text, whatever tags the model itself has for its reasoning."""

    def __init__(self) -> None:
        self._reasons = False

    def push(self, reasoning: str, text: str) -> str:
        """The text for the next parts of the answer."""
        written = ""
        if reasoning:
            written = reasoning if self._reasons else _OPENING + reasoning
            self._reasons = True
        if text:
            written += _CLOSING + text if self._reasons else text
            self._reasons = False
        return written

    def finish(self) -> str:
        """What closes reasoning that no text has followed."""
        closing = _CLOSING if self._reasons else ""
        self._reasons = False
        return closing


def split_reasoning(content: str) -> tuple[str, str]:
    """The reasoning that a kept answer begins with, and the rest of it."""
    found = _WRITTEN.match(content)
    return ("", content) if found is None else (found[1].strip(), content[found.end() :])
