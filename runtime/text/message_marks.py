"""Marks in messages, by which control tokens of a template are told from the same text in a message.

Before a template is rendered, a character that occurs nowhere else is inserted wherever a message has what looks like
a part of a special token. What the template writes itself has no marks, so a special token without a mark in it is the
template's, also where a template trims contents or joins them. Marks are removed before the text is encoded.

Text in which special tokens are plain text is encoded by a copy of the tokenizer without them (`PlainEncoding`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from ...errors import InputError
from .tokenizer_library import encode_text

_PART: Final = 3
"""Characters of the beginning or end of a special token that count as a part of it anywhere in a message."""
_FIRST_MARK: Final = 0xA000
"""Marks are syllables of Yi: they are printable, so that neither JSON nor `repr` escape them, and have no case."""
_SEARCHED: Final = 1 << 16
"""Number of characters that are searched at once."""
_JOINED_KEYS: Final = ("role",)
"""Values with which templates write special tokens, as in `<|` + role + `|>`."""
_STAND_INS: Final = range(0x10FFFD, 0xDFFF, -1)
"""Special tokens are written as characters that a text does not contain, of the private planes if these have enough."""


class MessageMarks:
    """Puts marks into the messages for one tokenizer.

    Args:
        tokens: texts of its special tokens.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens: Final = sorted({token for token in tokens if token}, key=len, reverse=True)
        beginnings = _any_of({token[:_PART] for token in self._tokens})
        ends = _any_of({token[-_PART:] for token in self._tokens})
        self._longest: Final = max(map(len, self._tokens), default=0)
        # A model without special tokens has patterns that match nothing.
        self._parts: Final = re.compile(f"{beginnings}|{ends}", re.IGNORECASE)
        self._part_begins: Final = re.compile(f"(?=({beginnings}))", re.IGNORECASE)
        self._part_ends: Final = re.compile(f"(?=({ends}))", re.IGNORECASE)
        self._beginnings: Final = {token[:size] for token in self._tokens for size in (1, 2) if size < len(token)}
        self._ends: Final = {token[-size:] for token in self._tokens for size in (1, 2) if size < len(token)}

    def mark(self, inputs: Mapping[str, Any], written: str) -> tuple[dict[str, Any], str] | None:
        """Return a copy of the inputs with marks, and the mark; None if nothing in them is part of a special token.

        Args:
            inputs: values by name: messages, tools and whatever else the template reads.
            written: other texts in which the mark may not occur, such as the template.

        Raises:
            InputError: the inputs are nested too deep.
        """
        try:
            texts = list(_texts(inputs))
        except RecursionError as error:
            raise InputError("the messages are nested too deep", "give texts, lists and dictionaries") from error
        if not any(self._has_parts(text) for text in texts):
            return None
        number = _FIRST_MARK
        while any(chr(number) in text for text in (written, *texts)):
            number += 1
        mark = chr(number)
        return {name: self._marked(value, mark) for name, value in inputs.items()}, mark

    def own_tokens(self, text: str, mark: str = "") -> list[str]:
        """Return the special tokens in a text that have no mark, in order."""
        return [match[0] for match in _matches(self._whole(mark), text, self._longest)]

    def replace_own(self, text: str, mark: str, replacement: Callable[[str], str]) -> str:
        """Replace the special tokens in a text that have no mark."""
        return self._whole(mark).sub(lambda match: replacement(match[0]), text)

    def _whole(self, mark: str) -> re.Pattern[str]:
        before = f"(?<!{re.escape(mark)})" if mark else ""  # for tokens of one character, which cannot hold a mark
        return re.compile(_any_of(token if len(token) > 1 else (before, token) for token in self._tokens))

    def _has_parts(self, text: str) -> bool:
        return self._open_start(text) or self._open_end(text) or any(_matches(self._parts, text, _PART))

    def _open_start(self, text: str) -> bool:
        start = text.lstrip()[:2]
        return start[:1] in self._ends or start in self._ends

    def _open_end(self, text: str) -> bool:
        end = text.rstrip()[-2:]
        return end[-1:] in self._beginnings or end in self._beginnings

    def _marked(self, value: Any, mark: str, *, borders: bool = True) -> Any:
        if isinstance(value, str):
            return self._marked_text(value, mark, borders) if self._has_parts(value) else value
        if isinstance(value, Mapping):
            # A key that is a name stays as it is: a template may look it up.
            marked = {}
            for key, part in value.items():
                name = self._marked(key, mark) if isinstance(key, str) and not key.isidentifier() else key
                marked[name] = self._marked(part, mark, borders=key not in _JOINED_KEYS)
            return marked
        if isinstance(value, (list, tuple)):
            return [self._marked(part, mark) for part in value]
        return value

    def _marked_text(self, text: str, mark: str, borders: bool) -> str:
        """Split off the first character of each beginning and the last of each end, and what is open at the borders."""
        places = {match.start() + (len(match[1]) > 1) for match in _matches(self._part_begins, text, _PART)}
        places |= {match.start() + len(match[1]) - 1 for match in _matches(self._part_ends, text, _PART)}
        if borders and self._open_start(text):
            places.add(len(text) - len(text.lstrip()))
        if borders and self._open_end(text):
            places.add(len(text.rstrip()))
        cuts = [0, *sorted(places), len(text)]
        return mark.join(text[start:end] for start, end in pairwise(cuts))


def _matches(pattern: re.Pattern[str], text: str, longest: int) -> Iterator[re.Match[str]]:
    """Matches of a pattern as `finditer` gives them, where none is longer than `longest`.

    Other threads run while a long text is searched: `re` holds the interpreter's lock from one match to the next.
    """
    start = 0
    while start < len(text):
        end = start + _SEARCHED
        match = pattern.search(text, start, end + longest)
        if match is None or match.start() >= end:
            start = end
        else:
            yield match
            start = max(match.end(), match.start() + 1)


def _any_of(parts: Iterable[str | tuple[str, str]]) -> str:
    """A pattern of any of some texts, the longest first; a pair is a pattern and the text after it."""
    written = [("", part) if isinstance(part, str) else part for part in parts]
    written.sort(key=lambda part: len(part[1]), reverse=True)
    return "(?:" + "|".join(before + re.escape(text) for before, text in written) + ")" if written else "(?!)"


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _texts(key)
            yield from _texts(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _texts(part)


class PlainEncoding:
    """The model of a tokenizer, with characters in the place of its special tokens.

    The text of a special token is plain text for it, and keeps everything else as it is: the normalizer, the
    pre-tokenizer and the other added tokens see the whole text.
    """

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        """Make one for texts that have the same private characters as `text`."""
        used = set(text)
        unused = (character for character in map(chr, _STAND_INS) if character not in used)
        self._plain = Tokenizer(tokenizer.model)
        if tokenizer.normalizer is not None:
            self._plain.normalizer = tokenizer.normalizer
        if tokenizer.pre_tokenizer is not None:
            self._plain.pre_tokenizer = tokenizer.pre_tokenizer
        added = sorted(tokenizer.get_added_tokens_decoder().items())
        self._ids: dict[int, int] = {}
        self.stand_ins: dict[str, str] = {}
        """Characters by the special token that they stand for."""
        for token_id, token in added:
            content = token.content
            if token.special:
                content = self.stand_ins[token.content] = next(unused)
            flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip")}
            normalized = token.normalized and not token.special
            self._plain.add_tokens([AddedToken(content, normalized=normalized, **flags)])
            added_id: int | None = self._plain.token_to_id(content)
            assert added_id is not None  # noqa: S101  it has just been added
            self._ids[added_id] = token_id
        self.border: Final = next(unused)
        """A character that no token spans, and that has no token."""
        self._plain.add_tokens([AddedToken(self.border, normalized=False)])
        self._border_id: Final = self._plain.token_to_id(self.border)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text in which characters stand for special tokens."""
        ids = encode_text(self._plain, text, add_special_tokens=False)
        return [self._ids.get(token, token) for token in ids if token != self._border_id]
