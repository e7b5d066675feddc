"""Values as models write them outside of JSON: Gemma's objects with bare keys, and Python's literals."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

from .call_regions import MAX_DEPTH
from .calls import NotACallError

_SPACE: Final = re.compile(r"\s*")
_NUMBER: Final = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?(?![\w.])")
_WORD: Final = re.compile(r"[A-Za-z_][\w.-]*")
_WORDS: Final[Mapping[str, Any]] = {
    "true": True,
    "false": False,
    "null": None,
    "True": True,
    "False": False,
    "None": None,
}
_ESCAPE: Final = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|(.))", re.DOTALL)
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_MAX_DIGITS: Final = 400


def string_pattern(quote: str, *, escapes: bool) -> re.Pattern[str]:
    """What a string between quotes looks like; `escapes` says whether a backslash has a meaning in it."""
    character = r"(?:[^\\]|\\.)" if escapes else "."
    return re.compile(f"{re.escape(quote)}({character}*?){re.escape(quote)}", re.DOTALL)


Strings: TypeAlias = Mapping[re.Pattern[str], bool]
"""What strings look like, those between longer quotes first; and whether a backslash has a meaning in them."""
PYTHON_STRINGS: Final[Strings] = {string_pattern(quote, escapes=True): True for quote in ('"""', "'''", '"', "'")}


class LiteralReader:
    """Reads values from a text, one after the other.

    Args:
        text: the text.
        strings: what strings look like.
    """

    def __init__(self, text: str, strings: Strings) -> None:
        self.text: Final = text
        self.at = 0
        """Index of the next character."""
        self._strings = strings

    def take(self, sign: str) -> bool:
        """Skip white space, and `sign` where it comes next; whether it did."""
        space = _SPACE.match(self.text, self.at)
        self.at = self.at if space is None else space.end()
        if not self.text.startswith(sign, self.at):
            return False
        self.at += len(sign)
        return True

    def expect(self, sign: str) -> None:
        """Skip white space and `sign`.

        Raises:
            NotACallError: it does not come next.
        """
        if not self.take(sign):
            raise NotACallError

    def expect_end(self) -> None:
        """Check that nothing but white space follows.

        Raises:
            NotACallError: something does.
        """
        if self.text[self.at :].strip():
            raise NotACallError

    def word(self) -> str:
        """Read a name.

        Raises:
            NotACallError: none comes next.
        """
        self.take("")
        found = _WORD.match(self.text, self.at)
        if found is None:
            raise NotACallError
        self.at = found.end()
        return found[0]

    def value(self, depth: int = 0) -> Any:
        """Read a value: a string, a number, a list, a mapping, or true, false and null in either spelling.

        Raises:
            NotACallError: none comes next, or it is nested too deep.
        """
        if depth == MAX_DEPTH:
            raise NotACallError
        if (text := self._string()) is not None:
            return text
        if self.take("{"):
            return self.mapping(depth + 1)
        for opening, closing in ("[]", "()"):
            if self.take(opening):
                return [self.value(depth + 1) for _ in self._items(closing)]
        if found := _NUMBER.match(self.text, self.at):
            if len(found[0]) > _MAX_DIGITS:
                raise NotACallError
            self.at = found.end()
            whole = found[0].lstrip("+-").isdigit()
            return int(found[0]) if whole else float(found[0])
        word = self.word()
        if word not in _WORDS:
            raise NotACallError
        return _WORDS[word]

    def mapping(self, depth: int = 0) -> dict[str, Any]:
        """Read what follows the opening brace of a mapping, with the closing one.

        Raises:
            NotACallError: it is not the rest of a mapping.
        """
        values: dict[str, Any] = {}
        for _ in self._items("}"):
            text = self._string()
            key = self.word() if text is None else text
            self.expect(":")
            values[key] = self.value(depth)
        return values

    def _items(self, closing: str) -> Iterator[None]:
        """Read the commas between items, each of which the caller reads, up to the closing sign."""
        first = True
        while not self.take(closing):
            if not first:
                self.expect(",")
                if self.take(closing):
                    return
            first = False
            yield

    def _string(self) -> str | None:
        """Read a string; None if none comes next."""
        self.take("")
        for pattern, escapes in self._strings.items():
            if found := pattern.match(self.text, self.at):
                self.at = found.end()
                return _ESCAPE.sub(_unescaped, found[1]) if escapes else found[1]
        return None


def _unescaped(found: re.Match[str]) -> str:
    code = found[1] or found[2]
    return chr(int(code, 16)) if code else _ESCAPED.get(found[3], found[3])
