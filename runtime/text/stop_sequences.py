"""Stop strings, found also when they arrive in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Lets text through up to the first stop string, holding back what might be the beginning of one.

    The first stop string is the one that is complete first, so the text does not depend on the pieces it comes in.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped = False
        """Whether a stop string has been met; nothing comes after it."""

    def push(self, text: str) -> str:
        """What of `text`, and of what was held back before, can be shown now."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        text = self._held + text
        found = [(index + len(stop), index) for stop in self._stops if (index := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            _, start = min(found)
            return text[:start]
        held = max(self._overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """What was held back and turned out to be no stop string."""
        text, self._held = self._held, ""
        return text

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that begins `stop`."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
