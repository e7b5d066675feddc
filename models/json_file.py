"""Reading and checking JSON of untrusted files."""

from __future__ import annotations

import json
import math
import reprlib
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec

from ..errors import EdgeError
from .regular_file import MAX_JSON_BYTES, read_regular

RecordT = TypeVar("RecordT")

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
"""A field of a record that is an integer of at least 1."""
WholeNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
"""A field of a record that is an integer of at least 0."""
Positive: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
"""A field of a record that is a number above 0."""
NotNegative: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
"""A field of a record that is a number of at least 0."""
NOT_EMPTY: Final = msgspec.Meta(min_length=1)
"""Annotates a field of a record that is a table or list with entries."""


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

    Raises:
        ValueError: the data does not fit.
    """
    try:
        return msgspec.convert(data, record_type, str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(f"is not a {record_type.__name__}: {error}") from error


def record_to_json(record: object) -> dict[str, Any]:
    """Convert a dataclass to a plain JSON object."""
    converted: dict[str, Any] = msgspec.to_builtins(record, str_keys=True)
    return converted


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
