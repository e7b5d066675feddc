"""Stretches of an answer that may be calls in markup of their own: XML elements, Gemma's objects, Python."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from .call_literals import PYTHON_STRINGS, LiteralReader, string_pattern
from .call_regions import CallReading, CallText, Reading
from .calls import NotACallError, OfferedTools, ToolCall, read_json, written_call

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
