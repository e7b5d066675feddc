"""Streaming detokenizer: turns tokens into text without splitting characters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from .tokenizer import TextTokenizer

_REPLACEMENT: Final = "\ufffd"
_MAX_HELD_TOKENS: Final = 64
"""Number of tokens after which text that is still not valid UTF-8 is shown as it is."""


class StreamDecoder:
    """Detokenizes one text piece by piece.

    The pieces joined equal the text of all tokens decoded at once, except for invalid UTF-8, where some decoders turn
    valid bytes into U+FFFD when an invalid one follows later.

    Each piece is the difference between decoding a short window with and without the new tokens, so tokenizers that
    strip or join at word borders follow their own rules (the method of text-generation-inference).
    """

    def __init__(self, tokenizer: TextTokenizer, marks: Mapping[int, str] | None = None) -> None:
        """Begin a text.

        Args:
            tokenizer: the tokenizer.
            marks: special tokens whose text is written, by their ids; the others are left out.
        """
        self._tokenizer = tokenizer
        self._marks = marks or {}
        self._ids: list[int] = []
        self._start = 0
        """Index of the first token of the window."""
        self._shown = 0
        """Number of tokens whose text was returned."""

    def push(self, tokens: Iterable[int]) -> str:
        """Add tokens and return the text that they complete; empty while a character is incomplete."""
        if self._marks:
            return "".join(map(self._push_marked, tokens))
        return self._push(tokens)

    def _push_marked(self, token: int) -> str:
        """Add a token that may be one of the marks."""
        mark = self._marks.get(token)
        if mark is None:
            return self._push((token,))
        window, text = self._shown, self.flush()
        if not text.endswith(_REPLACEMENT):
            self._start = window  # the next word keeps its leading space
        return text + mark

    def _push(self, tokens: Iterable[int]) -> str:
        # Special tokens are left out here, not by the tokenizer: a window of nothing else would lose the leading space
        # of the next word.
        self._ids.extend(token for token in tokens if token not in self._tokenizer.special_ids)
        text = self._pending()
        if not text or (text.endswith(_REPLACEMENT) and len(self._ids) - self._shown < _MAX_HELD_TOKENS):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return text

    @property
    def held(self) -> Sequence[int]:
        """Tokens whose text is held back, without special ones."""
        return self._ids[self._shown :]

    def copy(self, marks: Mapping[int, str] | None = None) -> StreamDecoder:
        """A detokenizer that goes on from here by itself, and writes these marks."""
        other = StreamDecoder(self._tokenizer, marks)
        # Nothing before the window is read again.
        other._ids, other._shown = self._ids[self._start :], self._shown - self._start
        return other

    def flush(self) -> str:
        """Return the text held back until now, with U+FFFD for incomplete characters."""
        text = self._pending()
        self._start = self._shown = len(self._ids)
        return text

    def _pending(self) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._shown])
        return self._tokenizer.decode(self._ids[self._start :])[len(before) :]
