"""Turning tokens into text as they come, without ever showing half a character."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from .tokenizer import TextTokenizer

_REPLACEMENT: Final = "\ufffd"
_MOST_HELD: Final = 64
"""A text that is still not valid UTF-8 after so many tokens is shown as it is."""


class StreamDecoder:
    """Detokenizes one text; the pieces joined are what decoding all its tokens at once gives. (Only of invalid UTF-8
    may they differ: some decoders turn valid bytes to U+FFFD in hindsight, when an invalid one follows.)

    Each piece is the difference between decoding a short window with and without the new tokens, so tokenizers that
    strip or join at word borders are handled by their own rules (the method of text-generation-inference).
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0
        """Where the window begins."""
        self._shown = 0
        """How many tokens' text has been returned."""

    def push(self, tokens: Iterable[int]) -> str:
        """The text that `tokens` complete; empty while a character is still in pieces."""
        # Left out here, not by the tokenizer: a window of special tokens alone would hide a word's leading space.
        self._ids.extend(token for token in tokens if token not in self._tokenizer.special_ids)
        text = self._pending()
        if not text or (text.endswith(_REPLACEMENT) and len(self._ids) - self._shown < _MOST_HELD):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return text

    def flush(self) -> str:
        """What was still held back, incomplete characters as U+FFFD."""
        text = self._pending()
        self._start = self._shown = len(self._ids)
        return text

    def _pending(self) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._shown])
        return self._tokenizer.decode(self._ids[self._start :])[len(before) :]
