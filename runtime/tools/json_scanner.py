"""Finds where a JSON object or array ends in text that comes in pieces."""

from __future__ import annotations

import re
from typing import Final

from .calls import NotACallError

MAX_DEPTH: Final = 128
"""Deepest nesting that is read: far more than arguments have, and less than Python's JSON decoder can take."""
_MAX_SCALAR: Final = 1000
"""Longest number that is read, in characters."""

_STRING_STOP: Final = re.compile(r'["\\]')
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_SCALAR: Final = re.compile(r"[-+.0-9A-Za-z]*")
_NUMBER_PART: Final = re.compile(r"[-+.0-9eE]+")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_LITERALS: Final = ("true", "false", "null")
_KEY: Final = '"'
_VALUE: Final = '{["-0123456789tfn'
"""First characters of a key, and of a value."""


class JsonScanner:
    """Reads the text of one JSON object or array piece by piece, and says where it ends.

    It follows the grammar of RFC 8259, except that strings may have control characters in them, as models write line
    ends there; escapes are not checked. Text that cannot become JSON is refused with its first wrong character.
    """

    def __init__(self) -> None:
        self._stack: list[str] = []
        """The brackets that close what is open."""
        self._allowed = "{["
        """The characters of which one comes next, outside of strings and numbers."""
        self._in_string = self._escaped = False
        self._scalar = ""
        """The number or literal that has begun; empty outside of one."""
        self.ended = False
        """Whether the value is complete."""
        self.count = 0
        """Number of characters that belong to the value so far, up to the sign, number or literal that does not."""

    def push(self, text: str, at: int = 0) -> bool:
        """Read on, from `text[at]` to the end of the text or of the value; returns whether the value is complete.

        Raises:
            NotACallError: the text cannot be JSON.
        """
        while at < len(text) and not self.ended:
            if self._in_string:
                end = self._read_string(text, at)
                self.count += end - at
            elif self._scalar:
                end = self._read_scalar(text, at)
            else:
                found = _SPACE.match(text, at)
                end = at if found is None else found.end()
                self.count += end - at
                if end < len(text):
                    self._read_sign(text[end])
                    self.count += not self._scalar
                    end += 1
            at = end
        return self.ended

    def _read_string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        found = _STRING_STOP.search(text, at)
        if found is None:
            return len(text)
        if found[0] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self._end_value(":" if self._allowed.startswith(_KEY) else "")
        return found.end()

    def _read_scalar(self, text: str, at: int) -> int:
        found = _SCALAR.match(text, at)
        stop = at if found is None else found.end()
        self._scalar += text[at:stop]
        scalar = self._scalar
        possible = _NUMBER_PART.fullmatch(scalar) or any(literal.startswith(scalar) for literal in _LITERALS)
        if not possible or len(scalar) > _MAX_SCALAR:
            raise NotACallError
        if stop < len(text):
            if scalar not in _LITERALS and not _NUMBER.fullmatch(scalar):
                raise NotACallError
            self.count += len(scalar)  # it is counted as a whole, where it turns out to be one
            self._scalar = ""
            self._end_value()
        return stop

    def _read_sign(self, char: str) -> None:
        """Read a character outside of strings and numbers, or the first one of them."""
        if char not in self._allowed or (char in "{[" and len(self._stack) >= MAX_DEPTH):
            raise NotACallError
        if char in "{[":
            self._stack.append("}" if char == "{" else "]")
            self._allowed = f"{_KEY}}}" if char == "{" else f"{_VALUE}]"
        elif char in "}]":
            self._stack.pop()
            self._end_value()
            self.ended = not self._stack
        elif char == ",":
            self._allowed = _KEY if self._stack[-1] == "}" else _VALUE
        elif char == ":":
            self._allowed = _VALUE
        elif char == '"':
            self._in_string = True
        else:
            self._scalar = char

    def _end_value(self, after: str = "") -> None:
        """Go on after a value, or after a key, where `after` comes next."""
        self._allowed = after or f",{''.join(self._stack[-1:])}"
