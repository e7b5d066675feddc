"""The text of documents, and the passages that it is split into."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any, Final

from ...models.user_text import unify_line_ends

PASSAGE_CHARACTERS: Final = 1_600
"""Most characters of a passage, about 250 English words."""
_OVERLAP: Final = 250
"""Most characters that a passage repeats from the end of the one before it."""
_PIECE: Final = re.compile(r"\n{1,240}|[^\n]{1,240}(?:\n|\Z|(?=\s))|[^\n]{1,240}")
"""A line, a part of a long line that ends with a word if it can, or empty lines."""
_HTML: Final = (".html", ".htm", ".xhtml")
_SPACES: Final = re.compile(r"[^\S\n]+")
_SNIFFED: Final = 8_192
"""Bytes in which a NUL says that a file is not text."""
_MOST_INVALID: Final = 0.1
"""Largest share of characters that may be invalid in a text file of another encoding."""


def document_text(name: str, data: bytes) -> str | None:
    """The text of a document; None if it is binary.

    Bytes that are not UTF-8 become U+FFFD. HTML loses its tags, scripts and styles, and keeps its line numbers.

    Args:
        name: name of the file, whose ending says whether it is HTML.
        data: what is in it.
    """
    if b"\0" in data[:_SNIFFED] or data.startswith(b"%PDF-"):
        return None
    text = unify_line_ends(data.decode("utf-8", "replace")).replace("\0", "\ufffd")
    if text.count("\ufffd") > _MOST_INVALID * len(text):
        return None
    return _text_of_html(text) if name.lower().endswith(_HTML) else text


def split_passages(text: str) -> Iterator[tuple[int, int, int]]:
    """Split a text into passages that overlap, at ends of paragraphs where there are some, else at ends of lines.

    Yields:
        Start and end of each passage in the text, in characters, and the number of its first line, from 1.
    """
    line, counted = 1, 0
    for first, last in _spans(text):
        passage = text[first:last].rstrip()
        start = last - len(text[first:last].lstrip("\n"))
        if passage:
            line += text.count("\n", counted, start)
            counted = start
            yield start, first + len(passage), line


def _spans(text: str) -> Iterator[tuple[int, int]]:
    pieces: list[tuple[int, int]] = []
    for match in _PIECE.finditer(text):
        if pieces and match.end() - pieces[0][0] > PASSAGE_CHARACTERS:
            last = _last_piece(text, pieces)
            yield pieces[0][0], pieces[last][1]
            following = last + 1
            while following > 1 and pieces[last][1] - pieces[following - 1][0] <= _OVERLAP:
                following -= 1
            pieces = pieces[following:]
        pieces.append(match.span())
    if pieces:
        yield pieces[0][0], pieces[-1][1]


def _last_piece(text: str, pieces: list[tuple[int, int]]) -> int:
    """The last piece of a passage: empty lines in its second half, or else all that fits."""
    for number in range(len(pieces) - 1, 0, -1):
        start, end = pieces[number]
        if start - pieces[0][0] < PASSAGE_CHARACTERS // 2:
            break
        if text[start:end].isspace():
            return number
    return len(pieces) - 1


def _text_of_html(text: str) -> str:
    reader = _HtmlText()
    try:
        reader.feed(text)
        reader.close()
    except AssertionError:  # how the parser of Python refuses some malformed declarations
        return text
    return _SPACES.sub(" ", "".join(reader.parts))


class _HtmlText(HTMLParser):
    """Collects the text of a page, each piece on the line that it has in the source."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: Final[list[str]] = []
        self._line = 1
        self._hidden = False

    def handle_starttag(self, tag: str, attrs: Any) -> None:  # noqa: ARG002
        self.parts.append(" ")
        self._hidden = tag in {"script", "style"}

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002
        self.parts.append(" ")
        self._hidden = False

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            line = self.getpos()[0]
            self.parts.extend(("\n" * (line - self._line), data))
            self._line = line + data.count("\n")
