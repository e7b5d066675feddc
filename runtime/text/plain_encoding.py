"""A tokenizer without special tokens, for texts of which only some are meant as control tokens."""

from __future__ import annotations

from typing import Final

from tokenizers import AddedToken, Tokenizer

from .tokenizer_library import encode_text

_FIRST_STAND_IN: Final = 0xF0000
"""Special tokens are written as characters of a private plane, the first that a text does not contain."""
_PLANE: Final = 0x8000


class PlainEncoding:
    """The model of a tokenizer, with characters in the place of its special tokens.

    The text of a special token is plain text for it, and keeps everything else as it is: the normalizer, the
    pre-tokenizer and the other added tokens see the whole text.
    """

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        """Make one for texts that have the same private characters as `text`."""
        first = _FIRST_STAND_IN
        while any(first <= ord(character) < first + _PLANE for character in text):
            first += _PLANE
        self._plain = Tokenizer(tokenizer.model)
        if tokenizer.normalizer is not None:
            self._plain.normalizer = tokenizer.normalizer
        if tokenizer.pre_tokenizer is not None:
            self._plain.pre_tokenizer = tokenizer.pre_tokenizer
        added = sorted(tokenizer.get_added_tokens_decoder().items())
        self._ids: dict[int, int] = {}
        self.stand_ins: dict[str, str] = {}
        """Characters by the special token that they stand for."""
        for number, (token_id, token) in enumerate(added):
            content = token.content
            if token.special:
                content = self.stand_ins[token.content] = chr(first + 1 + number)
            self._ids[self._add(content, token)] = token_id
        self.border: Final = chr(first)
        """A character that no token spans, and that has no token."""
        self._plain.add_tokens([AddedToken(self.border, normalized=False)])
        self._border_id: Final = self._plain.token_to_id(self.border)

    def occurs_in(self, text: str) -> bool:
        """Whether a text has one of the characters that stand for special tokens."""
        return any(character in text for character in (self.border, *self.stand_ins.values()))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text in which characters stand for special tokens."""
        ids = encode_text(self._plain, text, add_special_tokens=False)
        return [self._ids.get(token, token) for token in ids if token != self._border_id]

    def _add(self, content: str, token: AddedToken) -> int:
        """Add a token like another one, and return its id."""
        same = AddedToken(
            content,
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized and not token.special,
        )
        self._plain.add_tokens([same])
        added: int | None = self._plain.token_to_id(content)
        assert added is not None  # noqa: S101  it has just been added
        return added
