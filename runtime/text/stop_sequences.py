"""Finds stop sequences in streamed text."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through up to the first stop sequence; holds back text that may be the beginning of one.

    The first stop sequence is the one that is complete first, so the result does not depend on how the text is split
    into pieces.
    """

    def __init__(self, stop_sequences: Sequence[str]) -> None:
        self._stop_sequences = tuple(stop for stop in stop_sequences if stop)
        self._held = ""
        self.stopped = False
        """Whether a stop sequence was found; all later text is dropped."""

    def push(self, text: str) -> str:
        """Add text and return what cannot be part of a stop sequence."""
        if self.stopped or not self._stop_sequences:
            return "" if self.stopped else text
        text = self._held + text
        found = [(index + len(stop), index) for stop in self._stop_sequences if (index := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            _, start = min(found)
            return text[:start]
        held = max(self._overlap(text, stop) for stop in self._stop_sequences)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Return the text held back until now: no stop sequence will complete it."""
        text, self._held = self._held, ""
        return text

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest suffix of `text` that is a prefix of `stop`."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
