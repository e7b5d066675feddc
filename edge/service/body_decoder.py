"""Decodes request bodies into msgspec structs, and words what msgspec refuses.

JSON is read strictly: no duplicate keys, no NaN, no broken text, bounded.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any, Final, TypeVar, get_type_hints

import msgspec

from ...models.json_file import shown
from .request_error import ErrorCode, RequestError, invalid, unsupported

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
    "output.type": 'models here read text and images: {"type": "input_text", "text": ...}',
    "input.content.type": 'models here read text and images: {"type": "input_text", "text": ...}',
    "tools.type": 'edge-run knows functions: {"type": "function"}',
    "content.type": "parts of messages are text and images, which have the types of this API",
    "source.type": 'images come in base64: {"type": "base64", "data": ...}',
}
"""What a field that selects a form may be, by the end of its path without indices."""
_FOREIGN_TAGS: Final = frozenset(
    (
        *("document", "file", "function", "image", "image_url", "input_audio", "input_file", "input_image", "refusal"),
        *("custom", "grammar"),
        *("code_interpreter", "computer", "computer_use_preview", "file_search", "image_generation", "local_shell"),
        *("mcp", "shell", "web_search", "web_search_preview"),
        *("code_interpreter_call", "computer_call", "computer_call_output", "custom_tool_call", "file_search_call"),
        *("custom_tool_call_output", "image_generation_call", "item_reference", "local_shell_call", "mcp_call"),
        *("reasoning", "web_search_call"),
    )
)
"""Values of such fields that OpenAI's API has, and edge-run not in their place."""
MAX_DEPTH: Final = 100
"""Largest nesting of objects and lists."""
MAX_CHARACTERS: Final = 16_000_000
"""Largest number of characters of all texts and names of a request together."""
_MAX_CONTAINERS: Final = 200_000
"""Largest number of objects and lists."""
_MAX_VALUES: Final = 2_000_000
"""Largest number of values, such as token ids."""
_MAX_BITS: Final = 1023
"""Largest number of bits of an integer that a float can hold."""
_STRUCTURE: Final = re.compile(r'"(?:[^"\\]++|\\.)*+"?+|[\[{,]', re.DOTALL)
"""A string, or a character that begins a value."""
_NAMES: Final[tuple[tuple[type, str], ...]] = (
    (bool, "the boolean"),
    (int, "the integer"),
    (float, "the number"),
    (str, "the string"),
    (Mapping, "the object"),
    (list, "the array"),
)


class StrictStruct(msgspec.Struct, forbid_unknown_fields=True):
    """A body or a part of one, which has only the fields that are declared."""

    @classmethod
    def parse(cls, body: bytes | str | Mapping[str, Any]) -> Any:
        """What a body asks for: UTF-8 JSON, or the parsed object; errors as for `decode_body` and `request`."""
        return decode_body(body, cls).request()

    def request(self) -> Any:
        """What is asked for; the body itself where its fields say it all.

        Raises:
            RequestError: fields do not fit together, or a value cannot be used; the error has the path of the field.
        """
        return self


def about(text: str, *values: Any) -> msgspec.Meta:
    """What the schema says of a field, and which values of it are supported besides null where not all are."""
    return msgspec.Meta(description=text, extra_json_schema={"enum": [*values, None]} if values else None)


def read_object(body: bytes | str | Mapping[str, Any], max_characters: int = MAX_CHARACTERS) -> dict[str, Any]:
    """Parse a JSON object, or check one that has been parsed.

    Args:
        body: UTF-8 JSON, or the parsed object.
        max_characters: largest number of characters of its texts and names together.

    Raises:
        RequestError: it is not a JSON object, has a key twice, is nested too deeply, contains NaN, an infinite number
            or text that is not valid Unicode, or more text than allowed.
    """
    value = dict(body) if isinstance(body, Mapping) else _parse(body)
    if not isinstance(value, dict):
        raise RequestError(f"the body is {described(value)}", "it must be a JSON object", code=ErrorCode.INVALID_TYPE)
    if (characters := _check(value, (), 0)) > max_characters:
        raise RequestError(
            f"the request has {characters} characters of text",
            f"at most {max_characters} are read",
            code=ErrorCode.TOO_LARGE,
        )
    return value


def described(value: object) -> str:
    """A JSON value with its type, for messages: "the string 'x'"."""
    if value is None:
        return "null"
    for kind, name in _NAMES:
        if isinstance(value, kind):
            return f"{name} {json.dumps(value)}" if kind is bool else f"{name} {shown(value)}"
    return shown(value)


def field_path(parts: tuple[str | int, ...]) -> str:
    """The path of a field, such as `messages[0].content`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")


def _check_size(text: str) -> None:
    """Refuse JSON with too many values before it is parsed.

    The parser stops all other threads until it has made all values. The search for their beginnings does not, and takes
    no memory.
    """
    if len(text) <= min(_MAX_CONTAINERS, _MAX_VALUES):
        return
    containers = values = 0
    for match in _STRUCTURE.finditer(text):
        containers += text[match.start()] in "[{"
        values += text[match.start()] == ","
        if containers > _MAX_CONTAINERS or values >= _MAX_VALUES:
            raise RequestError(
                f"the body has more than {_MAX_CONTAINERS} objects and lists, or {_MAX_VALUES} values",
                "send several smaller requests",
                code=ErrorCode.TOO_LARGE,
            )


def _parse(body: bytes | str) -> Any:
    try:
        text = body if isinstance(body, str) else body.decode("utf-8")
        _check_size(text)
        return json.loads(text, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        what, hint = f"the body is not UTF-8: {error.reason} at byte {error.start}", "encode it as UTF-8"
    except json.JSONDecodeError as error:
        what, hint = f"the body is not valid JSON: {error}", "send a JSON object"
    except RecursionError:
        what, hint = "the body is nested too deeply", f"at most {MAX_DEPTH} levels are read"
    except ValueError:
        # Python converts at most 4300 digits, since the time grows with their square.
        what, hint = "the body has a number with thousands of digits", "send a number of ordinary size"
    raise RequestError(what, hint, code=ErrorCode.INVALID_JSON)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise RequestError(
            f"the key {shown(twice)} occurs twice in one object", "give it once", code=ErrorCode.INVALID_JSON
        )
    return fields


def _check(value: Any, path: tuple[str | int, ...], characters: int) -> int:
    """Check a value; return `characters` and the number of characters in it."""
    if not isinstance(value, (Mapping, list, tuple)):
        _check_scalar(value, path)
        return characters + len(value) if isinstance(value, str) else characters
    if len(path) >= MAX_DEPTH:
        raise RequestError(
            "the body is nested too deeply", f"at most {MAX_DEPTH} levels are read", code=ErrorCode.INVALID_JSON
        )
    if not isinstance(value, Mapping):
        for index, each in enumerate(value):
            characters = _check(each, (*path, index), characters)
        return characters
    for key, each in value.items():
        if not isinstance(key, str) or not _encodable(key):
            raise _bad(path, f"has the key {shown(key)}", "keys must be valid text")
        characters = _check(each, (*path, key), characters + len(key))
    return characters


def _check_scalar(value: Any, path: tuple[str | int, ...]) -> None:
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, str):
        if not _encodable(value):
            raise _bad(path, "contains half of a surrogate pair", "send valid Unicode")
    elif isinstance(value, int):
        # Converting a larger one to a float fails; msgspec before 0.22 ends with a SystemError then.
        if value.bit_length() > _MAX_BITS:
            raise _bad(path, f"is an integer of {value.bit_length()} bits", f"at most {_MAX_BITS} are read")
    elif not isinstance(value, float):
        raise _bad(path, f"is {shown(value)}", "it must be a value that JSON has")
    elif not math.isfinite(value):
        raise _bad(path, f"is {value}", "it must be a finite number")


def _encodable(text: str) -> bool:
    """Whether a text is valid Unicode: one with half of a surrogate pair has no UTF-8 form."""
    with suppress(UnicodeEncodeError):
        return text.isascii() or bool(text.encode())
    return False


def _bad(path: tuple[str | int, ...], what: str, hint: str) -> RequestError:
    param = field_path(path)[:200].encode(errors="replace").decode() or None
    return invalid(param, f"{param or 'the body'} {what}", hint)


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
        for extra in getattr(hint, "__metadata__", ()):
            if values := (extra.extra_json_schema or {}).get("enum"):
                found[name] = tuple(values)
    return found


def _alternative(kind: type[msgspec.Struct], path: tuple[str | int, ...]) -> str:
    """What to do instead of giving a field that is not supported."""
    hint = get_type_hints(kind, include_extras=True).get(str(path[0])) if len(path) == 1 else None
    reasons = [(extra.description or "").partition(": ")[2].rstrip(".") for extra in getattr(hint, "__metadata__", ())]
    return next(filter(None, reasons), "edge-run does not do this: leave the field out")


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
