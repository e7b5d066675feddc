"""Streaming text of an answer: its start, tokens to whole characters, and the stop sequences in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ...errors import InputError
from ...models.json_file import shown
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
        if not self._marks:
            return self._push(tokens)
        pieces = []
        for token in tokens:
            if (mark := self._marks.get(token)) is None:
                pieces.append(self._push((token,)))
                continue
            window, text = self._shown, self.flush()
            if not text.endswith(_REPLACEMENT):
                self._start = window  # the next word keeps its leading space
            pieces.append(text + mark)
        return "".join(pieces)

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


def beginning_at_end(text: str, sign: str) -> int:
    """Length of the longest end of `text` that is a beginning of `sign`, and not all of it."""
    return next((n for n in range(min(len(text), len(sign) - 1), 0, -1) if text.endswith(sign[:n])), 0)


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
        """Whether the text has ended; all later text is dropped."""
        self.found = ""
        """The stop sequence before which it ended."""

    def push(self, text: str) -> str:
        """Add text and return what cannot be part of a stop sequence."""
        if self.stopped or not self._stop_sequences:
            return "" if self.stopped else text
        text = self._held + text
        # A stop sequence that ends in what comes before was found there, or is none.
        places = [(stop, text.find(stop, max(self._unreturned - len(stop) + 1, 0))) for stop in self._stop_sequences]
        found = [(at + len(stop), at, stop) for stop, at in places if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            _, start, self.found = min(found)
            return self._returned(text[:start])
        self._held = self._end_to_hold(text)
        return self._returned(text[: len(text) - len(self._held)])

    def end(self) -> None:
        """End the text here: all later text is dropped, and `flush` returns what is held back."""
        self.stopped = True

    def stop(self) -> None:
        """End the text here: what is held back is dropped, and all later text."""
        self.stopped, self._held = True, ""

    def flush(self) -> str:
        """Return the text held back until now: no stop sequence will complete it."""
        text, self._held = self._held, ""
        return self._returned(text)

    def _returned(self, text: str) -> str:
        """What to return of the beginning of the text: that without what comes before."""
        skipped = min(self._unreturned, len(text))
        self._unreturned -= skipped
        return text[skipped:]

    def _end_to_hold(self, text: str) -> str:
        """The end of `text` that may be the beginning of a stop sequence."""
        held = max((beginning_at_end(text, stop) for stop in self._stop_sequences), default=0)
        return text[len(text) - held :]


@dataclass(frozen=True, eq=False)
class AnswerStart:
    """The tokens that an answer begins with, and the state of the detokenizer behind them.

    The state is as if the answer had been generated up to there, so that the text goes on as it would have.
    """

    token_ids: tuple[int, ...]
    text: str
    """Text of the tokens, without a character at their end that is not complete: the text that is generated begins
    with it."""
    _decoder: StreamDecoder

    @classmethod
    def of(
        cls, start: str | Sequence[int], tokenizer: TextTokenizer, *, vocab_size: int, ignore_eos: bool = False
    ) -> AnswerStart:
        """Make the start of an answer from a text, in which special tokens are plain text, or from token ids.

        Args:
            start: the text or the token ids; there may be none.
            tokenizer: the model's.
            vocab_size: number of token ids that the model has.
            ignore_eos: whether answers go on after end-of-sequence tokens.

        Raises:
            InputError: a token id is not one of the model's, or ends the answer.
        """
        token_ids = tokenizer.encode_plain(start) if isinstance(start, str) else [int(token) for token in start]
        for index, token in enumerate(token_ids):
            if not 0 <= token < vocab_size:
                raise InputError(
                    f"answer_start[{index}] is the token {token}", f"token ids of this model are 0 to {vocab_size - 1}"
                )
            if token in tokenizer.eos and not ignore_eos:
                raise InputError(
                    f"answer_start[{index}] is the end-of-sequence token {shown(tokenizer.written(token))}",
                    "leave it out: nothing follows it",
                )
        decoder = StreamDecoder(tokenizer)
        text = "".join([decoder.push((token,)) for token in token_ids])
        return cls(tuple(token_ids), text, decoder)

    def decoder(self, marks: Mapping[int, str] | None = None) -> StreamDecoder:
        """A detokenizer for what follows, which writes these special tokens."""
        return self._decoder.copy(marks)
