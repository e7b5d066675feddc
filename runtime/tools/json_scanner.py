"""Finds where a JSON object or array ends in text that comes in pieces."""

from __future__ import annotations

import re
from enum import Enum, auto
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


class _Expects(Enum):
    """What comes next, outside of strings and numbers."""

    VALUE = auto()
    KEY = auto()
    COLON = auto()
    COMMA_OR_END = auto()


class JsonScanner:
    """Reads the text of one JSON object or array piece by piece, and says where it ends.

    It follows the grammar of RFC 8259, except that strings may have control characters in them, as models write line
    ends there; escapes are not checked. Text that cannot become JSON is refused with its first wrong character.
    """

    def __init__(self) -> None:
        self._stack: list[str] = []
        """The brackets that close what is open."""
        self._expects = _Expects.VALUE
        self._is_empty = False
        """Whether the innermost array or object has just begun, and so may end."""
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
            self._expects = _Expects.COLON if self._expects is _Expects.KEY else _Expects.COMMA_OR_END
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
            self._expects = _Expects.COMMA_OR_END
        return stop

    def _read_sign(self, char: str) -> None:
        """Read a character that is not part of a string or number; of those, the first one."""
        expects, is_empty = self._expects, self._is_empty
        self._is_empty = False
        if char in "]}" and (is_empty or expects is _Expects.COMMA_OR_END):
            if self._stack.pop() != char:
                raise NotACallError
            self._expects = _Expects.COMMA_OR_END
            self.ended = not self._stack
        elif expects is _Expects.VALUE:
            self._begin_value(char)
        elif expects is _Expects.KEY and char == '"':
            self._in_string = True
        elif expects is _Expects.COLON and char == ":":
            self._expects = _Expects.VALUE
        elif expects is _Expects.COMMA_OR_END and char == ",":
            self._expects = _Expects.KEY if self._stack[-1] == "}" else _Expects.VALUE
        else:
            raise NotACallError

    def _begin_value(self, char: str) -> None:
        if char in "{[":
            if len(self._stack) >= MAX_DEPTH:
                raise NotACallError
            self._stack.append("}" if char == "{" else "]")
            self._expects = _Expects.KEY if char == "{" else _Expects.VALUE
            self._is_empty = True
        elif self._stack and char == '"':
            self._in_string = True
        elif self._stack and char in "-0123456789tfn":
            self._scalar = char
        else:  # neither an object nor an array, or no value
            raise NotACallError
