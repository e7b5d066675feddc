"""Reading text files and files of JSON lines that users give."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError


def read_text(path: Path) -> str:
    """Read a UTF-8 text file.

    Raises:
        InputError: the file cannot be read, is not UTF-8, or is blank.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}", "check the path") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text", "convert it first") from error
    if not text.strip():
        raise InputError(f"{path} is empty", "give a file with at least one prompt")
    return text


def json_lines(text: str, path: Path) -> list[dict[str, Any]]:
    """Parse JSON lines to objects, at least one; blank lines are skipped.

    Raises:
        InputError: a line is not a JSON object.
    """
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}, line {number}: not JSON", "every line must be one object") from error
        if not isinstance(row, dict):
            raise InputError(f"{path}, line {number}: not an object", "every line must be one object")
        rows.append(row)
    return rows


def text_of(row: Mapping[str, Any], field: str, path: Path, number: int) -> str:
    """Return the text in a field of row `number` of a file.

    Raises:
        InputError: the field is missing, not a text, or blank.
    """
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{path}, row {number}: {field} is {value!r:.40}", "it must be a text that is not blank")
    return value


def turns_of(row: Mapping[str, Any], path: Path, number: int) -> list[Any]:
    """Return the turns of row `number` of a file, at least one.

    Raises:
        InputError: the row has no turns.
    """
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns:
        raise InputError(f"{path}, row {number}: turns is {turns!r:.40}", "it must be a list of at least one")
    return turns
