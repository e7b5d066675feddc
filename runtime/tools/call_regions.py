"""Stretches of an answer that may be calls, read as their text arrives; those with JSON in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, TypeAlias, TypeVar

from .calls import NotACallError, OfferedTools, ToolCall, calls_of_json, read_json, written_call

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
"""Reads text as it arrives: yields while it needs more, and returns what it has read."""
CallReading: TypeAlias = Reading[tuple[Sequence[ToolCall], int]]
"""Reads the calls of a region, none where it is text; and the number of characters that belong to it."""

MAX_DEPTH: Final = 128
"""Deepest nesting that is read: far more than arguments have, and less than Python's JSON decoder can take."""
_MAX_SCALAR: Final = 1000
"""Longest number that is read, in characters."""
_MAX_NAME: Final = 200
_SPACE: Final = re.compile(r"\s*")
_NAME: Final = re.compile(r"[\w.:/-]*")
_BARE_CALL: Final = re.compile(r'\s*\{\s*"(?:name|type|function)"\s*:')
_BETWEEN_CALLS: Final = re.compile(r"[\s;]*")
_JSON_SPACE: Final = re.compile(r"[ \t\r\n]*")
_STRING_REST: Final = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)
_JSON_TOKEN: Final = re.compile(
    r'[{}\[\],:"]|(?:-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null)(?=[^-+.0-9A-Za-z])'
)
"""A sign, the beginning of a string, or a number, true, false or null, which end where something else follows."""
_BEGUN_SCALAR: Final = re.compile(r"[-+.0-9eE]{0,1000}|t(?:r(?:ue?)?)?|f(?:a(?:l(?:se?)?)?)?|n(?:u(?:ll?)?)?")
_KEY: Final = '"'
_VALUE: Final = '{["-0123456789tfn'
"""First characters of a key, and of a value."""


class CallText:
    """The text of a region that may be calls, as far as it has arrived, and how its parts are read.

    Args:
        opening: the sign that it begins with, maybe with white space; empty where it has none.
        tools: functions that may be called.
        closing: the sign that it ends with; empty for none.
    """

    def __init__(self, opening: str, tools: OfferedTools, closing: str) -> None:
        self.text = opening
        """All of its text so far, and perhaps some that follows it."""
        self.at = len(opening)
        """Index of what is to be read next."""
        self.ended = False
        """Whether no more text follows."""
        self.tools: Final = tools
        self.closing: Final = closing
        self._is_bare: Final = not opening.strip()

    def looks_like_call(self, end: int) -> bool:
        """Whether the first characters up to an index, which are not a call, were meant to be one.

        JSON without a sign before it is most often just JSON.
        """
        return not self._is_bare or _BARE_CALL.match(self.text, 0, end) is not None

    def skip(self, pattern: re.Pattern[str] = _SPACE) -> str:
        """Skip and return what a pattern matches here; the pattern may match an empty text."""
        found = pattern.match(self.text, self.at)
        self.at = self.at if found is None else found.end()
        return "" if found is None else found[0]

    def next_sign(self, *signs: str) -> str | None:
        """The one of some signs that comes next; empty while that is open, None if it is none of them."""
        if (sign := next((sign for sign in signs if self.text.startswith(sign, self.at)), None)) is not None:
            return sign
        rest = self.text[self.at : self.at + max(map(len, signs))]
        return "" if any(sign.startswith(rest) for sign in signs) else None

    def expect(self, *signs: str) -> Reading[str]:
        """Skip white space and one of some signs, which is returned.

        Raises:
            NotACallError: something else comes next.
        """
        self.skip()
        while not (sign := self.next_sign(*signs)):
            if sign is None:
                raise NotACallError
            yield
            self.skip()
        self.at += len(sign)
        return sign

    def end(self, *, optional: bool = False) -> Reading[int]:
        """Where the region ends: after white space and the closing sign, or here where that is left out.

        Raises:
            NotACallError: something else comes next, and the sign is not optional.
        """
        end = self.at
        self.skip()
        while not (sign := self.next_sign(self.closing)):
            if sign is None or self.ended:
                if self.at < len(self.text) and not optional:
                    raise NotACallError
                return end
            yield
            self.skip()
        self.at += len(sign)
        return self.at

    def name(self, *stops: str) -> Reading[tuple[str, str]]:
        """Read a name up to one of some signs; returns both.

        Raises:
            NotACallError: something else comes before the sign.
        """
        begin = self.at
        while True:
            name = self.skip(_NAME)
            stop = self.next_sign(*stops) if len(name) <= _MAX_NAME else None
            if stop:
                self.at += len(stop)
                return name, stop
            self.at = begin
            if stop is None:
                raise NotACallError
            yield

    def function(self, *stops: str) -> Reading[tuple[str, str]]:
        """Read the name of an offered function up to one of some signs; returns both.

        Raises:
            NotACallError: something else comes next, or the function was not offered.
        """
        name, stop = yield from self.name(*stops)
        if name not in self.tools:
            raise NotACallError
        return name, stop

    def json(self) -> Reading[Any]:
        """Read a JSON object or array, up to its end.

        RFC 8259 gives the grammar, except that strings may have control characters in them, as models write line
        ends there. Text that cannot become JSON is refused with its first wrong character.

        Raises:
            NotACallError: it is not JSON; `at` is where it goes wrong.
        """
        begin, stack, allowed = self.at, list[str](), "{["
        while True:
            self.skip(_JSON_SPACE)
            while (token := _JSON_TOKEN.match(self.text, self.at)) is None:
                if self.text[self.at : self.at + 1] not in allowed or not _BEGUN_SCALAR.fullmatch(self.text, self.at):
                    raise NotACallError
                yield
                self.skip(_JSON_SPACE)
            char = token[0][0]
            too_much = len(stack) == MAX_DEPTH if char in "{[" else len(token[0]) > _MAX_SCALAR
            if char not in allowed or too_much:
                raise NotACallError
            self.at = token.end()
            is_key = char == '"' and allowed.startswith(_KEY)
            match char:
                case "{" | "[":
                    stack.append("}" if char == "{" else "]")
                    allowed = f"{_KEY}}}" if char == "{" else f"{_VALUE}]"
                    continue
                case "," | ":":
                    allowed = _KEY if char == "," and stack[-1] == "}" else _VALUE
                    continue
                case "}" | "]":
                    stack.pop()
                case '"':
                    self.skip(_STRING_REST)
                    while not self.text.startswith('"', self.at):
                        yield
                        self.skip(_STRING_REST)
                    self.at += 1
            if not stack:
                return read_json(self.text[begin : self.at])
            allowed = ":" if is_key else f",{stack[-1]}"


RegionReader: TypeAlias = Callable[[CallText], CallReading]


def json_calls(text: CallText, *, optional_closing: bool = False, alone: bool = False) -> CallReading:
    """Read a JSON object or array with calls, up to a closing sign, to its own end, or to the end of the answer.

    Args:
        text: the text of the region.
        optional_closing: whether the sign may be left out.
        alone: whether nothing may follow but further objects, which white space and semicolons separate. The calls are
            known at the end of the answer then.
    """
    values = [(yield from text.json())]
    if alone:
        while True:
            text.skip(_BETWEEN_CALLS)
            if text.at < len(text.text):
                values.append((yield from text.json()))
            elif text.ended:
                break
            else:
                yield
    end = (yield from text.end(optional=optional_closing)) if text.closing else text.at
    try:
        calls = [call for value in values for call in calls_of_json(value, text.tools)]
    except NotACallError:
        calls = []
    return calls if not alone or all(map(_is_only_a_call, values)) else [], end


def _is_only_a_call(value: Any) -> bool:
    """Whether an object without any sign around it has what a call has, and nothing else."""
    fields = set(value) if isinstance(value, dict) else set()
    return fields <= {"type", "id", "name", "function", "parameters", "arguments"} and bool(
        fields & {"parameters", "arguments", "function"}
    )


def named_json_call(text: CallText) -> CallReading:
    """Read Mistral's newer call: a name, perhaps `[CALL_ID]` and an identifier, `[ARGS]` and a JSON object."""
    name, stop = yield from text.function("[ARGS]", "[CALL_ID]")
    call_id = (yield from text.name("[ARGS]"))[0] if stop == "[CALL_ID]" else ""
    arguments = yield from text.json()
    return [written_call(name, arguments, text.tools, call_id)], text.at
