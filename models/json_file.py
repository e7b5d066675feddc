"""JSON from files that nobody vouches for: an object, or one line that says why not."""

from __future__ import annotations

import json
import math
import reprlib
from pathlib import Path
from typing import Any

from ..errors import EdgeError


def read_json_object(path: Path, error_type: type[EdgeError], hint: str) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        EdgeError: of `error_type` and with that hint: the file cannot be read or holds no JSON object.
    """
    try:
        return parse_json_object(path.read_bytes())
    except OSError as error:
        raise error_type(f"{path} cannot be read: {error.strerror or error}", hint) from error
    except ValueError as error:
        raise error_type(f"{path} {error}", hint) from error


def parse_json_object(text: str | bytes) -> dict[str, Any]:
    """The object that a JSON text is; bytes are UTF-8.

    Raises:
        ValueError: it is something else; the message goes on from the name of the text ("is not valid JSON: ...").
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


def is_whole(value: object, least: int) -> bool:
    """Whether a JSON value is a whole number of at least `least`; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_finite(value: object) -> bool:
    """Whether a JSON value is a number that a float can hold; true and false are none."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def shown(value: object) -> str:
    """A JSON value for a message, however long or deep it is."""
    return reprlib.repr(value)
