"""The bytes that a single token stands for, whatever kind of tokenizer it belongs to."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, Protocol

_REPLACEMENT: Final = "\ufffd"
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CACHED: Final = 1 << 14
"""Number of tokens whose bytes are kept: more than the alternatives of a long answer."""


class Vocabulary(Protocol):
    """What `TokenBytes` asks of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are not part of a text."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""

    def decode(self, ids: list[int]) -> str:
        """Text of tokens."""

    def written(self, token_id: int) -> str:
        """A token as the vocabulary writes it."""


class TokenBytes:
    """Looks up the bytes of tokens.

    The text of a token that decodes to whole characters is its text after another token, so that its leading space
    stays. Of a token that is part of a character, the bytes are in its name: byte-level vocabularies write every byte
    as a character, byte-fallback vocabularies write `<0xE2>`.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        anchor = vocabulary.encode("a", add_special_tokens=False)[-1:]
        self._anchor: Final = anchor if vocabulary.decode(anchor) else []
        self._anchor_text: Final = vocabulary.decode(self._anchor)
        self.of: Final = lru_cache(maxsize=_CACHED)(self._of)
        """Bytes that a token adds to a text; empty for a special token, which is not part of the text."""

    def shown(self, token_id: int) -> str:
        """A token as text: a special token as it is written, U+FFFD for a part of a character."""
        if token_id in self._vocabulary.special_ids:
            return self._vocabulary.written(token_id)
        return self.of(token_id).decode("utf-8", "replace")

    def _of(self, token_id: int) -> bytes:
        vocabulary = self._vocabulary
        if token_id in vocabulary.special_ids:
            return b""
        joined = vocabulary.decode([*self._anchor, token_id])
        alone = joined.removeprefix(self._anchor_text)
        text = vocabulary.decode([token_id]) if alone == joined else alone
        if _REPLACEMENT in text:
            written = vocabulary.written(token_id)
            if byte := _BYTE_TOKEN.fullmatch(written):
                return bytes([int(byte[1], 16)])
            if all(char in _BYTE_OF_CHARACTER for char in written):
                return bytes(_BYTE_OF_CHARACTER[char] for char in written)
        return text.encode()


def _byte_characters() -> dict[str, int]:
    """The characters that byte-level vocabularies write for bytes (GPT-2's): printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER: Final = _byte_characters()
