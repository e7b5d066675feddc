"""Reading and checking JSON of untrusted files."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, TypeAlias, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from ..errors import EdgeError
from .regular_file import MAX_JSON_BYTES, os_errors_as, read_regular

MAX_COUNT: Final = (1 << 31) - 1
"""Limit on integers, which the graph's operators store in 32 bits."""
MAX_NUMBER: Final = 1e30
"""Limit on real numbers; powers of larger ones overflow."""
RecordT = TypeVar("RecordT")


@dataclass(frozen=True)
class Bound:
    """Annotates a field of a record: its value must be at least, or above, a number."""

    least: float = -math.inf
    above: float = -math.inf


_KINDS: Final[Mapping[type, str]] = {
    int: "a whole number",
    float: "a finite number",
    str: "text",
    bool: "true or false",
}
Count: TypeAlias = Annotated[int, Bound(least=1)]
WholeNumber: TypeAlias = Annotated[int, Bound(least=0)]
Positive: TypeAlias = Annotated[float, Bound(above=0)]
NotNegative: TypeAlias = Annotated[float, Bound(least=0)]


def read_json_object(
    path: Path, error_type: type[EdgeError], hint: str, *, max_bytes: int = MAX_JSON_BYTES
) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        EdgeError: the file cannot be read, is larger than `max_bytes` or holds no JSON object; the error has type
            `error_type` and that hint.
    """
    try:
        with os_errors_as(error_type, f"{path} cannot be read", hint):
            return parse_json_object(read_regular(path, max_bytes))
    except ValueError as error:
        raise error_type(f"{path} {error}", hint) from error


def parse_json_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object; bytes are UTF-8.

    Raises:
        ValueError: the text is something else; the message continues the name of the file ("is not valid JSON: ...").
    """
    try:
        data = json.loads(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("is not valid JSON: it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError("does not hold a JSON object")
    return data


def record_from_json(record_type: type[RecordT], data: object) -> RecordT:
    """Convert parsed JSON to a dataclass, checking the types and bounds of its fields; unknown fields are left out.

    Fields may be numbers, strings, booleans, enumerations, other dataclasses, tuples of one type, mappings, and unions
    with None. Floats must be finite.

    Raises:
        ValueError: the data does not fit.
    """
    try:
        return typed_record(record_type, data)
    except (TypeError, ValueError) as error:
        raise ValueError(f"is not a {record_type.__name__}: it {error}") from error


def typed_record(record_type: type[RecordT], data: object, path: str = "") -> RecordT:
    """`record_from_json`, with messages that continue "it": lacks NAME, or has NAME VALUE, which must be WHAT.

    `path` precedes the names.
    """
    if not isinstance(data, dict):
        raise _wrong(path, data, "an object")
    prefix = f"{path}." if path else ""
    required = [
        each for each in fields(cast("Any", record_type)) if each.default is MISSING and each.default_factory is MISSING
    ]
    if missing := [f"{prefix}{each.name}" for each in required if each.name not in data]:
        raise ValueError(f"lacks {', '.join(missing)}")
    given = {name: kind for name, kind in _hints(cast("Any", record_type)).items() if name in data}
    return record_type(**{name: _converted(kind, data[name], f"{prefix}{name}") for name, kind in given.items()})


_hints: Final = cache(partial(get_type_hints, include_extras=True))
"""The types of a record's fields; to evaluate them takes longer than to read the record."""


def _converted(kind: Any, value: Any, path: str) -> Any:
    """Convert a JSON value to the type of a field; `path` leads to it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        converted = None if value is None else _converted(arguments[0], value, path)
    elif origin in (Mapping, dict):
        if not isinstance(value, dict):
            raise _wrong(path, value, "an object")
        number = int in (arguments[0], *get_args(arguments[0]))
        keys = {key: _converted(arguments[0], int(key) if number else key, key) for key in value}
        converted = {keys[key]: _converted(arguments[1], each, f"{path}.{key}") for key, each in value.items()}
    elif origin is tuple:
        element, kinds = (str, "texts") if arguments[0] is str else (object, "values")
        if is_dataclass(arguments[0]):
            element, kinds = dict, "objects"
        if not isinstance(value, list) or not all(isinstance(each, element) for each in value):
            raise _wrong(path, value, f"a list of {kinds}")
        converted = tuple(_converted(arguments[0], each, f"{path}.{index}") for index, each in enumerate(value))
    elif isinstance(kind, type) and is_dataclass(kind):
        converted = typed_record(kind, value, path)
    elif isinstance(kind, type) and issubclass(kind, Enum):
        known = [each.value for each in kind]
        if not isinstance(value, str) or value not in known:
            raise _wrong(path, value, f"one of {', '.join(known)}" if isinstance(value, str) else "text")
        converted = kind(value)
    else:
        kind, bound = arguments if origin is Annotated else (kind, Bound())
        fits = is_finite(value) if kind is float else type(value) is kind
        if not fits or (kind in (int, float) and not (value >= bound.least and value > bound.above)):
            least = f" of at least {bound.least}" if bound.least > -math.inf else ""
            above = f" above {bound.above}" if bound.above > -math.inf else ""
            raise _wrong(path, value, _KINDS[kind] + least + above)
        converted = kind(value)
    return converted


def _wrong(path: str, value: object, expected: str) -> ValueError:
    return ValueError(f"has {path} {shown(value)}, which must be {expected}" if path else "is not an object")


def is_whole(value: object, minimum: int) -> bool:
    """Return whether a JSON value is an integer of at least `minimum`; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def is_finite(value: object) -> bool:
    """Return whether a JSON value is a finite number; true and false are not."""
    with suppress(OverflowError):  # of an integer
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return False


def shown(value: object) -> str:
    """Abbreviate a JSON value for an error message."""
    return reprlib.repr(value)
