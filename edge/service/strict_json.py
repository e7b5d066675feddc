"""Parses JSON objects of other programs: no duplicate keys, no NaN, no broken text, bounded."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from ...models.json_file import shown
from .request_error import ErrorCode, RequestError, invalid

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


_NAMES: Final[tuple[tuple[type, str], ...]] = (
    (bool, "the boolean"),
    (int, "the integer"),
    (float, "the number"),
    (str, "the string"),
    (Mapping, "the object"),
    (list, "the array"),
)


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
