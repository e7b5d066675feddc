"""Values as models write them outside of JSON: Gemma's objects with bare keys, and Python's literals."""

from __future__ import annotations

import re
from collections.abc import Mapping
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


Quotes: TypeAlias = Mapping[str, bool]
"""What strings are written between, longer ones before their beginnings; whether a backslash has a meaning in them."""
PYTHON_QUOTES: Final[Quotes] = dict.fromkeys(('"""', "'''", '"', "'"), True)


class LiteralReader:
    """Reads values from a text, one after the other.

    Args:
        text: the text.
        quotes: what strings are written between.
    """

    def __init__(self, text: str, quotes: Quotes) -> None:
        self.text: Final = text
        self.at = 0
        """Index of the next character."""
        self._quotes = quotes
        self._depth = 0

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

    def value(self) -> Any:
        """Read a value: a string, a number, a list, a mapping, or true, false and null in either spelling.

        Raises:
            NotACallError: none comes next.
        """
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotACallError
        try:
            return self._value()
        finally:
            self._depth -= 1

    def mapping(self) -> dict[str, Any]:
        """Read what follows the opening brace of a mapping, with the closing one.

        Raises:
            NotACallError: it is not the rest of a mapping.
        """
        values: dict[str, Any] = {}
        while not self.take("}"):
            if values:
                self.expect(",")
                if self.take("}"):
                    break
            quote = self._quote()
            key = self.word() if quote is None else self._string(quote)
            self.expect(":")
            values[key] = self.value()
        return values

    def _value(self) -> Any:
        if (quote := self._quote()) is not None:
            return self._string(quote)
        if self.take("{"):
            return self.mapping()
        for opening, closing in ("[]", "()"):
            if self.take(opening):
                return self._list(closing)
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

    def _list(self, closing: str) -> list[Any]:
        values: list[Any] = []
        while not self.take(closing):
            if values:
                self.expect(",")
                if self.take(closing):
                    break
            values.append(self.value())
        return values

    def _quote(self) -> str | None:
        self.take("")
        return next((quote for quote in self._quotes if self.text.startswith(quote, self.at)), None)

    def _string(self, quote: str) -> str:
        escapes = self._quotes[quote]
        begin = end = self.at + len(quote)
        while True:
            end = self.text.find(quote, end)
            if end < 0:
                raise NotACallError
            written = self.text[begin:end]
            if not escapes or (len(written) - len(written.rstrip("\\"))) % 2 == 0:
                break
            end += 1  # the mark is escaped
        self.at = end + len(quote)
        return _ESCAPE.sub(_unescaped, written) if escapes else written


def _unescaped(found: re.Match[str]) -> str:
    code = found[1] or found[2]
    return chr(int(code, 16)) if code else _ESCAPED.get(found[3], found[3])
