"""Log-probabilities of an answer's tokens, assigned to the pieces of its text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from ..sampling.logprobs import PositionLogprobs
from ..speculation.rounds import TokenOrigin
from .tokenizer import TokenBytes

_REPLACEMENT: Final = "\ufffd"


@dataclass(frozen=True)
class TokenLogprob:
    """A token of an answer, or an alternative to it, with its log-probability.

    Log-probabilities are natural logarithms of the model's own distribution: before temperature, filters, penalties
    and biases.
    """

    token_id: int
    text: str
    """The token as text: U+FFFD where it is a part of a character; a special token as the vocabulary writes it."""
    bytes: bytes
    """What the token adds to the text as UTF-8; empty for a special token. The bytes of an answer's tokens, joined, are
    its text."""
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    """The most probable tokens at this position, the most probable first, whether or not the token is among them."""
    origin: TokenOrigin | None = None
    """How the token came to be; None for an alternative."""


class AnswerTokens:
    """The tokens of an answer, listed as soon as all of their text has been shown.

    Text is held back while a character is incomplete, or while a stop sequence may be beginning; its tokens are held
    back with it. At the end, a token is listed if some of its text was shown: where a stop sequence begins inside a
    token, that token is the last one.

    Args:
        token_bytes: bytes of the tokenizer's tokens.
        before: tokens before these that have part of a character, which these complete. They are not listed.
    """

    def __init__(self, token_bytes: TokenBytes, before: Sequence[int] = ()) -> None:
        self._token_bytes: Final = token_bytes
        self._undecoded: list[tuple[int, PositionLogprobs | None, TokenOrigin | None]]
        self._undecoded = [(token, None, None) for token in before]
        """Tokens whose text is not known yet; those before the answer have no log-probabilities, and are not listed."""
        self._placed: deque[tuple[TokenLogprob, int, int]] = deque()
        """Tokens, and the bytes of the answer's text at which the text of each begins and ends."""
        self._decoded = 0
        """Bytes of text that the tokens have decoded to."""
        self._shown = 0
        """Bytes of text that have been shown."""

    def add(self, logprobs: PositionLogprobs, decoded: str, origin: TokenOrigin | None = None) -> None:
        """Add a token, and the text that the detokenizer has returned for it and tokens held back before it."""
        self._undecoded.append((logprobs.token_id, logprobs, origin))
        if decoded:
            self._place(decoded)

    def take(self, shown: str) -> tuple[TokenLogprob, ...]:
        """The tokens whose text is complete with the next piece of shown text."""
        self._shown += len(shown.encode())
        complete = []
        while self._placed and self._placed[0][2] <= self._shown:
            complete.append(self._placed.popleft()[0])
        return tuple(complete)

    def finish(self, decoded: str, shown: str) -> tuple[TokenLogprob, ...]:
        """The rest of the tokens, given the last text of the detokenizer and the last piece of shown text."""
        self._place(decoded)
        complete = self.take(shown)
        return (*complete, *(token for token, start, _ in self._placed if start < self._shown))

    def _place(self, decoded: str) -> None:
        """Give every token that was held back its part of their text."""
        text = decoded.encode()
        parts = self._split(decoded, text)
        # Where bytes were replaced by U+FFFD, no byte of the text belongs to one token: each has the whole place.
        exact = b"".join(parts) == text
        start, whole = self._decoded, (self._decoded, self._decoded + len(text))
        for (_, logprobs, origin), part in zip(self._undecoded, parts, strict=True):
            begin, end = (start, start + len(part)) if exact else whole
            if logprobs is not None:
                self._placed.append((self._token(logprobs, origin, part), begin, end))
            start = end
        self._decoded += len(text)
        self._undecoded.clear()

    def _split(self, decoded: str, text: bytes) -> Sequence[bytes]:
        """The bytes of every token that was held back; joined, they are `text` unless it has replacement characters."""
        parts = [self._token_bytes.of(token) for token, _, _ in self._undecoded]
        joined = b"".join(parts)
        if joined == text or _REPLACEMENT in decoded:
            return parts
        texts = [index for index, part in enumerate(parts) if part]
        if texts and joined == b" " + text:  # many tokenizers drop the space before the first word
            parts[texts[0]] = parts[texts[0]][1:]
            return parts
        # A tokenizer whose words depend on their neighbours: the last token has completed the text.
        return [text if index == (texts or [0])[-1] else b"" for index in range(len(parts))]

    def _token(self, logprobs: PositionLogprobs, origin: TokenOrigin | None, part: bytes) -> TokenLogprob:
        token_id = logprobs.token_id
        names = self._token_bytes
        shown = part.decode("utf-8", "replace") if part else names.shown(token_id)
        top = tuple(
            TokenLogprob(other, names.shown(other), names.of(other), logprob) for other, logprob in logprobs.top
        )
        if origin is not None and origin.rejected_id is not None:
            origin = replace(origin, rejected=names.shown(origin.rejected_id))
        return TokenLogprob(token_id, shown, part, logprobs.logprob, top, origin)
