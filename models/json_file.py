"""Reading and checking JSON of untrusted files."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from ..errors import EdgeError
from .regular_file import MAX_JSON_BYTES, read_regular

RecordT = TypeVar("RecordT")


@dataclass(frozen=True)
class Bound:
    """Annotates a field of a record: its value must be at least, or above, a number."""

    least: float = -math.inf
    above: float = -math.inf


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
        return parse_json_object(read_regular(path, max_bytes))
    except OSError as error:
        raise error_type(f"{path} cannot be read: {error.strerror or error}", hint) from error
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
        return record_type(**_field_values(record_type, data))
    except (TypeError, ValueError) as error:
        raise ValueError(f"is not a {record_type.__name__}: {error}") from error


def record_to_json(record: Any) -> dict[str, Any]:
    """Convert a dataclass to a plain JSON object, which `json.dumps` can write."""
    return asdict(record)


def _field_values(record_type: type, data: object) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{shown(data)} is not an object")
    values = {}
    for name, kind in get_type_hints(record_type, include_extras=True).items():
        if name in data:
            try:
                values[name] = _converted(kind, data[name])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
    return values


def _converted(kind: Any, value: Any) -> Any:
    """Convert a JSON value to the type of a field."""
    origin, arguments = get_origin(kind), get_args(kind)
    converted = value
    if origin is Annotated:
        converted, bound = _converted(arguments[0], value), arguments[1]
        if not (converted >= bound.least and converted > bound.above):
            raise ValueError(f"{converted} is too small")
    elif origin is UnionType:
        converted = None if value is None else _converted(arguments[0], value)
    elif origin is Mapping and isinstance(value, dict):
        converted = {_converted_key(arguments[0], key): _converted(arguments[1], each) for key, each in value.items()}
    elif origin is tuple and isinstance(value, list):
        converted = tuple(_converted(arguments[0], each) for each in value)
    elif kind is float and is_finite(value):
        converted = float(value)
    elif isinstance(kind, type) and issubclass(kind, Enum):
        converted = kind(value)
    elif isinstance(kind, type) and is_dataclass(kind):
        converted = record_from_json(kind, value)
    elif kind not in {int, str, bool} or type(value) is not kind:
        raise ValueError(f"{shown(value)} has another type")
    return converted


def _converted_key(kind: Any, key: str) -> Any:
    number = kind is int or int in get_args(kind)
    return _converted(kind, int(key) if number else key)


def is_whole(value: object, minimum: int) -> bool:
    """Return whether a JSON value is an integer of at least `minimum`; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def is_finite(value: object) -> bool:
    """Return whether a JSON value is a finite number; true and false are not."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def shown(value: object) -> str:
    """Abbreviate a JSON value for an error message."""
    return reprlib.repr(value)
