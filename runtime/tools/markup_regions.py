"""Stretches of an answer that may be calls in markup of their own: XML elements, Gemma's objects, Python."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

from .call_regions import MAX_DEPTH, CallReading, CallText, Reading
from .calls import NotACallError, OfferedTools, ToolCall, read_json, written_call

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


_FUNCTION: Final = "<function="
_PARAMETER: Final = "<parameter="
_PARAMETER_END: Final = "</parameter>"
_INNER_TAGS: Final = (_PARAMETER, "</function>")


def xml_call(text: CallText) -> CallReading:
    """Read Qwen3-Coder's call: `<function=name>` with `<parameter=name>` elements, perhaps in `<tool_call>`.

    The texts of parameters follow the tool's schema. Without `<tool_call>`, its closing tag may be left out too.
    """
    is_wrapped = not text.text.startswith(_FUNCTION)
    if is_wrapped:
        yield from text.expect(_FUNCTION)
    name, _ = yield from text.function(">")
    values: dict[str, Any] = {}
    while (yield from text.expect(*_INNER_TAGS)) == _PARAMETER:
        while (stop := text.text.find(">", text.at)) < 0:
            yield
        parameter, text.at = text.text[text.at : stop], stop + 1
        values[parameter] = typed_value((yield from _parameter(text)), text.tools.properties(name).get(parameter))
    end = yield from text.end(optional=not is_wrapped)
    return [written_call(name, values, text.tools)], end


def _parameter(text: CallText) -> Reading[str]:
    """Read the text of a parameter: up to a closing tag that another tag of the call follows."""
    begin = search = text.at
    while True:
        if (end := text.text.find(_PARAMETER_END, search)) < 0:
            search = max(search, len(text.text) - len(_PARAMETER_END) + 1)
            yield
            continue
        text.at = search = end + len(_PARAMETER_END)
        text.skip()
        tag = text.next_sign(*_INNER_TAGS)
        if tag:
            return text.text[begin:end]
        if tag is not None:  # open: look at this place again
            search = end
            yield


def typed_value(text: str, schema: Any) -> Any:
    """The value that a parameter's text stands for: text where the schema says so, else JSON if it is JSON."""
    text = text.removeprefix("\n").removesuffix("\n")
    types = schema.get("type") if isinstance(schema, Mapping) else None
    if types == "string":
        return text
    word = text.strip()
    if word in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[word]
    try:
        return read_json(word)
    except NotACallError:
        return text


def braced_call(text: CallText, *, quote: str) -> CallReading:
    """Read Gemma's call: `call:name{key:value,...}` up to the closing sign, with strings between quotes of its own."""
    yield from text.expect("call:")
    name, _ = yield from text.function("{")
    signs = re.compile(f"({re.escape(quote)})|{re.escape(text.closing)}")
    search, in_string = text.at, False
    while True:
        if (sign := signs.search(text.text, search)) is None:
            search = max(search, len(text.text) - max(len(quote), len(text.closing)) + 1)
            yield
            continue
        search = sign.end()
        if sign[1] is not None:
            in_string = not in_string
        elif not in_string:
            break
    strings = {string_pattern(quote, escapes=False): False, string_pattern('"', escapes=True): True}
    reader = LiteralReader(text.text[text.at : sign.start()], strings)
    values = reader.mapping()
    reader.expect_end()
    return [written_call(name, values, text.tools)], search


def python_calls(text: CallText) -> CallReading:
    """Read calls as Python writes them: `name(key=value)`, also in `print()` or a list.

    They go up to the closing sign, or to the end of the answer where there is none.
    """
    closing = text.closing
    while (end := text.text.find(closing, text.at) if closing else -1) < 0:
        if text.ended and not closing:
            end = len(text.text)
            break
        yield
    reader = LiteralReader(text.text[text.at : end], PYTHON_STRINGS)
    in_list = reader.take("[")
    calls = [_python_call(reader, text.tools)]
    while reader.take(",") if in_list else reader.take(";") or reader.at < len(reader.text.rstrip()):
        calls.append(_python_call(reader, text.tools))
    if in_list:
        reader.expect("]")
    reader.expect_end()
    return calls, end + len(closing)


def _python_call(reader: LiteralReader, tools: OfferedTools) -> ToolCall:
    name = reader.word()
    reader.expect("(")
    if name == "print" and name not in tools:
        call = _python_call(reader, tools)
        reader.expect(")")
        return call
    if name not in tools:
        name = name.removesuffix(".call")
    names = list(tools.properties(name))
    values: dict[str, Any] = {}
    position = 0
    while not reader.take(")"):
        if position:
            reader.expect(",")
        before = reader.at
        try:
            key = reader.word()
            reader.expect("=")
        except NotACallError:
            reader.at = before
            if position >= len(names):
                raise
            key = names[position]
        values[key] = reader.value()
        position += 1
    return written_call(name, values, tools)
