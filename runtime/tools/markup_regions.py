"""Stretches of an answer that may be calls in markup of their own: XML elements, Gemma's objects, Python."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from .call_literals import PYTHON_QUOTES, LiteralReader
from .call_regions import Region, RegionEnd
from .calls import NotACallError, OfferedTools, ToolCall, read_json, written_call

_SPACE: Final = re.compile(r"\s*")
_FUNCTION: Final = "<function="
_FUNCTION_END: Final = "</function>"
_PARAMETER: Final = "<parameter="
_PARAMETER_END: Final = "</parameter>"
_INNER_TAGS: Final = (_PARAMETER, _FUNCTION_END)


class XmlRegion(Region):
    """Qwen3-Coder's call: `<function=name>` with `<parameter=name>` elements, whose texts follow the tool's schema.

    Args:
        opening: `<tool_call>`, or `<function=` where the model has left that out.
        tools: functions that may be called.
        closing: the sign that it ends with, which may be left out without `<tool_call>`.
    """

    def __init__(self, opening: str, tools: OfferedTools, *, closing: str) -> None:
        super().__init__(opening, tools, closing=closing)
        self._is_wrapped = opening != _FUNCTION
        self._in_function = not self._is_wrapped
        self._function: str | None = None
        self._parameter: str | None = None
        self._begin = self._search = 0
        """Where the text of the parameter begins, and up to where it has no end."""
        self._values: dict[str, Any] = {}
        self._end = 0
        """Where the function element ends; 0 while it has not."""

    def read(self, *, ended: bool) -> RegionEnd | None:
        """Read on in the calls of this form."""
        if self._function is None and not self._read_head(ended=ended):
            return None
        while not self._end:
            more = self._read_value() if self._parameter is not None else self._read_tag(ended=ended)
            if not more:
                return None
        end = self.end_after(self.closing, self._end, optional=not self._is_wrapped, ended=ended)
        return None if end is None else RegionEnd([written_call(self._function, self._values, self.tools)], end)

    def _read_head(self, *, ended: bool) -> bool:
        """Read up to the function's name; whether it is complete."""
        if not self._in_function:
            if not self.skip_space() or not self.require(_FUNCTION, ended=ended):
                return False
            self._in_function = True
        self._function = self.function(">")
        return self._function is not None

    def _read_tag(self, *, ended: bool) -> bool:
        """Read the tag of a parameter, or the one that ends the function; whether it is complete."""
        if not self.skip_space():
            return False
        rest = self.text[self.at :]
        if rest.startswith(_FUNCTION_END):
            self._end = self.at = self.at + len(_FUNCTION_END)
            return True
        if not rest.startswith(_PARAMETER):
            if ended or not any(tag.startswith(rest) for tag in _INNER_TAGS):
                raise NotACallError
            return False
        after = self.at + len(_PARAMETER)
        stop = self.text.find(">", after)
        if stop < 0:
            return False
        self._parameter = self.text[after:stop]
        self._begin = self._search = self.at = stop + 1
        return True

    def _read_value(self) -> bool:
        """Read the text of a parameter: up to a closing tag that another tag of the call follows."""
        while (end := self.text.find(_PARAMETER_END, self._search)) >= 0:
            after = end + len(_PARAMETER_END)
            found = _SPACE.match(self.text, after)
            rest = self.text[after if found is None else found.end() :]
            if any(rest.startswith(tag) for tag in _INNER_TAGS):
                assert self._function is not None and self._parameter is not None  # noqa: S101, PT018
                schema = self.tools.properties(self._function).get(self._parameter)
                self._values[self._parameter] = typed_value(self.text[self._begin : end], schema)
                self._parameter, self.at = None, after
                return True
            if any(tag.startswith(rest) for tag in _INNER_TAGS):
                self._search = end
                return False
            self._search = after
        self._search = max(self._search, len(self.text) - len(_PARAMETER_END) + 1, self._begin)
        return False


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


class BracedRegion(Region):
    """Gemma's call: `call:name{key:value,...}` up to a closing sign, with strings between quotes of its own.

    Args:
        opening: the sign that it begins with.
        tools: functions that may be called.
        closing: the sign that it ends with.
        quote: what strings are written between.
    """

    def __init__(self, opening: str, tools: OfferedTools, *, closing: str, quote: str) -> None:
        super().__init__(opening, tools, closing=closing)
        self._quote = quote
        self._signs = re.compile(f"({re.escape(quote)})|{re.escape(closing)}")
        self._name: str | None = None
        self._body = self._search = 0
        self._in_string = False

    def read(self, *, ended: bool) -> RegionEnd | None:
        """Read on in the calls of this form."""
        if not self._body:
            if not self.skip_space() or not self.require("call:", ended=ended):
                return None
            self._body = self._search = self.at
        if self._name is None:
            self._name = self.function("{")
            if self._name is None:
                return None
            self._search = self.at
        while sign := self._signs.search(self.text, self._search):
            if sign[1] is None and not self._in_string:
                reader = LiteralReader(self.text[self.at : sign.start()], {self._quote: False, '"': True})
                values = reader.mapping()
                if reader.text[reader.at :].strip():
                    raise NotACallError
                return RegionEnd([written_call(self._name, values, self.tools)], sign.end())
            self._in_string ^= sign[1] is not None
            self._search = sign.end()
        longest = max(len(self._quote), len(self.closing))
        self._search = max(self._search, len(self.text) - longest + 1)
        return None


class PythonRegion(Region):
    """Calls as Python writes them: `name(key=value)`, also in `print()` or a list.

    They go up to the closing sign, or to the end of the answer where there is none.
    """

    def read(self, *, ended: bool) -> RegionEnd | None:
        """Read on in the calls of this form."""
        end = self.text.find(self.closing, self.at) if self.closing else -1
        if end < 0:
            if not ended or self.closing:
                return None
            end = len(self.text)
        reader = LiteralReader(self.text[self.at : end], PYTHON_QUOTES)
        calls: list[ToolCall] = []
        in_list = reader.take("[")
        while True:
            calls.append(self._call(reader))
            if not (reader.take(",") if in_list else reader.take(";") or reader.at < len(reader.text.rstrip())):
                break
        if in_list:
            reader.expect("]")
        if reader.text[reader.at :].strip():
            raise NotACallError
        return RegionEnd(calls, end + len(self.closing))

    def _call(self, reader: LiteralReader) -> ToolCall:
        name = reader.word()
        reader.expect("(")
        if name == "print" and name not in self.tools:
            call = self._call(reader)
            reader.expect(")")
            return call
        if name not in self.tools:
            name = name.removesuffix(".call")
        names = list(self.tools.properties(name))
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
        return written_call(name, values, self.tools)
