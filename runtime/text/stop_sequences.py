"""Finds stop sequences in streamed text."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through up to the first stop sequence; holds back text that may be the beginning of one.

    The first stop sequence is the one that is complete first, so the result does not depend on how the text is split
    into pieces.

    Args:
        stop_sequences: the stop sequences.
        before: text that comes before. A stop sequence may begin in it, but not lie in it, and none of it is returned.
    """

    def __init__(self, stop_sequences: Sequence[str], before: str = "") -> None:
        self._stop_sequences = tuple(stop for stop in stop_sequences if stop)
        self._held = self._end_to_hold(before)
        self._unreturned = len(self._held)
        """Number of characters at the beginning of `_held` that come before the text."""
        self.stopped = False
        """Whether a stop sequence was found; all later text is dropped."""

    def push(self, text: str) -> str:
        """Add text and return what cannot be part of a stop sequence."""
        if self.stopped or not self._stop_sequences:
            return "" if self.stopped else text
        text = self._held + text
        found = [(index + len(stop), index) for stop in self._stop_sequences if (index := self._find(stop, text)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            _, start = min(found)
            return self._returned(text[:start])
        self._held = self._end_to_hold(text)
        return self._returned(text[: len(text) - len(self._held)])

    def stop(self) -> None:
        """End the text here: what is held back is dropped, and all later text."""
        self.stopped, self._held = True, ""

    def flush(self) -> str:
        """Return the text held back until now: no stop sequence will complete it."""
        text, self._held = self._held, ""
        return self._returned(text)

    def _find(self, stop: str, text: str) -> int:
        """Index of the first `stop` in `text` that ends behind what comes before; negative if there is none."""
        return text.find(stop, max(self._unreturned - len(stop) + 1, 0))

    def _returned(self, text: str) -> str:
        """What to return of the beginning of the text: that without what comes before."""
        skipped = min(self._unreturned, len(text))
        self._unreturned -= skipped
        return text[skipped:]

    def _end_to_hold(self, text: str) -> str:
        """The end of `text` that may be the beginning of a stop sequence."""
        held = max((self._overlap(text, stop) for stop in self._stop_sequences), default=0)
        return text[len(text) - held :]

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest suffix of `text` that is a prefix of `stop`."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
