"""Decodes request bodies into msgspec structs, and words what msgspec refuses."""

from __future__ import annotations

import difflib
import json
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from .request_error import ErrorCode, RequestError, invalid, unsupported
from .strict_json import MAX_CHARACTERS, described, field_path, read_object


class StrictStruct(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a body, which has only the fields that are declared."""


def about(text: str, *values: Any) -> msgspec.Meta:
    """What the schema says of a field, and which values of it are supported besides null where not all are."""
    return msgspec.Meta(description=text, extra_json_schema={"enum": [*values, None]} if values else None)


_Body = TypeVar("_Body", bound=msgspec.Struct)

_PREPARING: Final = threading.Lock()

_MESSAGE: Final = re.compile(r"(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`)?", re.DOTALL)
_FIELD: Final = re.compile(r"Object (contains unknown|missing required) field `(.*)`", re.DOTALL)
_TYPE: Final = re.compile(r"Expected `([^`]*)`, got `[^`]*`")
_BOUND: Final = re.compile(r"Expected `([^`]*)` (of length )?(<=|>=) (\S+)")
_PART: Final = re.compile(r"\[(\d+|\.\.\.)\]|\.?([^.\[\]]+)")
_WORDS: Final = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "null": "null",
    "array": "an array",
    "object": "an object",
}
_TAGS: Final = {
    "role": "roles are system, developer, user, assistant and tool",
    "text.format.type": "formats are text, json_object and json_schema",
    "response_format.type": "formats are text, json_object and json_schema",
    "input.type": "items are message, reasoning, function_call and function_call_output",
    "output.type": 'models here read text: {"type": "input_text", "text": ...}',
    "input.content.type": 'models here read text: {"type": "input_text", "text": ...}',
    "tools.type": 'edge-run knows functions: {"type": "function"}',
    "content.type": 'models here read text: {"type": "text", "text": ...}',
}
"""What a field that selects a form may be, by the end of its path without indices."""
_FOREIGN_TAGS: Final = frozenset(
    (
        *("file", "function", "image_url", "input_audio", "input_file", "input_image", "refusal"),
        *("custom", "grammar"),
        *("code_interpreter", "computer", "computer_use_preview", "file_search", "image_generation", "local_shell"),
        *("mcp", "shell", "web_search", "web_search_preview"),
        *("code_interpreter_call", "computer_call", "computer_call_output", "custom_tool_call", "file_search_call"),
        *("custom_tool_call_output", "image_generation_call", "item_reference", "local_shell_call", "mcp_call"),
        *("reasoning", "web_search_call"),
    )
)
"""Values of such fields that OpenAI's API has, and edge-run not in their place."""


def decode_body(
    body: bytes | str | Mapping[str, Any], kind: type[_Body], max_characters: int = MAX_CHARACTERS
) -> _Body:
    """Decode a body; errors as for `read_object` and `decode_fields`."""
    return decode_fields(read_object(body, max_characters), kind)


def decode_fields(fields: Mapping[str, Any], kind: type[_Body]) -> _Body:
    """Decode the fields of a body.

    Fields of the type None are not supported by edge-run; values outside of the `enum` of a field's
    metadata are values that it does not support.

    Raises:
        RequestError: a field is unknown, missing, not supported or has another form.
    """
    _prepare(kind)
    try:
        decoded = msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _request_error(str(error), fields, kind) from None
    _refuse_unsupported_values(decoded, ())
    return decoded


@cache
def _prepare(kind: type[msgspec.Struct]) -> None:
    """Let msgspec read the type hints of a body and of all structs in it before it is used.

    It does so with the first value, and crashes the process where two threads have the first ones (release 0.22).
    """
    with _PREPARING, suppress(msgspec.ValidationError):
        msgspec.convert({}, kind)


def _refuse_unsupported_values(value: Any, path: tuple[str | int, ...]) -> None:
    if isinstance(value, list):
        for index, each in enumerate(value):
            _refuse_unsupported_values(each, (*path, index))
    elif isinstance(value, msgspec.Struct):
        supported = _supported_values(type(value))
        for name in value.__struct_fields__:
            field = getattr(value, name)
            if name in supported and field not in supported[name]:
                param = field_path((*path, name))
                choices = " and ".join(json.dumps(each) for each in supported[name] if each is not None)
                raise unsupported(param, f"{param} is {described(field)}", f"edge-run supports {choices}")
            _refuse_unsupported_values(field, (*path, name))


@cache
def _supported_values(kind: type[msgspec.Struct]) -> dict[str, tuple[Any, ...]]:
    """The values that are supported of each field that has a list of them in its metadata."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for extra in _metadata(hint):
            if values := (extra.extra_json_schema or {}).get("enum"):
                found[name] = tuple(values)
    return found


def _alternative(kind: type[msgspec.Struct], path: tuple[str | int, ...]) -> str:
    """What to do instead of giving a field that is not supported."""
    hint = get_type_hints(kind, include_extras=True).get(str(path[0])) if len(path) == 1 else None
    reasons = [(extra.description or "").partition(": ")[2].rstrip(".") for extra in _metadata(hint)]
    return next(filter(None, reasons), "edge-run does not do this: leave the field out")


def _metadata(hint: Any) -> tuple[msgspec.Meta, ...]:
    return tuple(get_args(hint)[1:]) if get_origin(hint) is Annotated else ()


def _request_error(message: str, fields: Mapping[str, Any], kind: type[msgspec.Struct]) -> RequestError:
    """What msgspec refuses as an error with a code and the path of the field."""
    unknown = _FIELD.fullmatch(message)
    # A name of a client's may look like the end of a message; there is no path where it is one of the body's own.
    found = None if unknown and unknown[2] in fields else _MESSAGE.fullmatch(message)
    what, path = (found["what"], _parts(found["path"] or "")) if found else (message, ())
    param, value = field_path(path), _value_at(fields, path)
    if field := _FIELD.fullmatch(what):
        return _field_error(path, field[2], kind, missing=field[1] == "missing required")
    if bound := _BOUND.fullmatch(what):
        return _bound_error(param, value, bound)
    if what.startswith("Invalid value"):
        return _tag_error(fields, path)
    code = ErrorCode.INVALID_TYPE
    if found and found["key"]:
        what, hint = f"{param} has a key that is not an integer", "keys are token ids"
    elif expected := _TYPE.fullmatch(what):
        if expected[1] == "null":
            return unsupported(param, f"{param} is not supported", _alternative(kind, path))
        types = " or ".join(_WORDS.get(each, each) for each in expected[1].split(" | "))
        what, hint = f"{param} is {described(value)}", f"it must be {types}"
    else:
        what, hint, code = f"{param} is {described(value)}", what.lower(), ErrorCode.INVALID_VALUE
    return RequestError(what, hint, code=code, param=param or None)


def _field_error(path: tuple[str | int, ...], name: str, kind: type[msgspec.Struct], *, missing: bool) -> RequestError:
    param = field_path((*path, name if len(name) < 100 else f"{name[:97]}..."))
    if missing:
        return RequestError(f"{param} is missing", "the field is required", code=ErrorCode.MISSING_FIELD, param=param)
    close = difflib.get_close_matches(name[:100], kind.__struct_fields__, 1) if not path else ()
    hint = f"did you mean {close[0]}?" if close else "leave it out: fields that are not known are refused, not ignored"
    return RequestError(f"unknown field {param}", hint, code=ErrorCode.UNKNOWN_FIELD, param=param)


def _bound_error(param: str, value: Any, bound: re.Match[str]) -> RequestError:
    kind, length, sign, limit = bound.groups()
    side = "at most" if sign == "<=" else "at least"
    if length:
        items = "items" if kind == "array" else "characters"
        what, hint = f"{param} has {len(value)} {items}", f"it must have {side} {limit}"
    else:
        what, hint = f"{param} is {described(value)}", f"it must be {side} {limit}"
    return invalid(param, what, hint)


def _tag_error(fields: Mapping[str, Any], path: tuple[str | int, ...]) -> RequestError:
    """The error for a `type` or `role` that selects no form that is known."""
    param, value = field_path(path), _value_at(fields, path)
    names = ".".join(part for part in path if isinstance(part, str))
    hint = next((text for end, text in _TAGS.items() if names.endswith(end)), "")
    if value not in _FOREIGN_TAGS:
        return invalid(param, f"{param} is {described(value)}", hint)
    if names.endswith("format.type"):
        param = field_path(path[:-1])
    elif isinstance(owner := _value_at(fields, path[:-1]), Mapping) and value in owner:
        # A part with an image has it in a field that is named like its type.
        param = field_path((*path[:-1], value))
    return unsupported(param, f"{param} is not supported: {described(value)}", hint)


def _parts(path: str) -> tuple[str | int, ...]:
    return tuple(int(index) if index.isdecimal() else name for index, name in _PART.findall(path) if index != "...")


def _value_at(fields: Mapping[str, Any], path: tuple[str | int, ...]) -> Any:
    """The value at a path, or at the last part of it that exists, where values of a mapping have no path."""
    value: Any = fields
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            break
    return value
