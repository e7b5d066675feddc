"""Reading text that users give: files, files of JSON lines, and standard input."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError
from .regular_file import MAX_TEXT_BYTES, read_regular_or_substitution


def read_text(path: Path, hint: str = "give a file with at least one prompt") -> str:
    """Read a UTF-8 text file, or a shell's process substitution; see `decode_text`.

    Args:
        path: path of the file.
        hint: what to do about a file that is blank.

    Raises:
        InputError: the file cannot be read, is not UTF-8, or is blank.
    """
    try:
        data = read_regular_or_substitution(path.expanduser(), MAX_TEXT_BYTES)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise InputError(f"{path} cannot be read: {reason or error}", "check the path") from error
    except ValueError as error:
        raise InputError(f"{str(path)!r} is not a path: {error}", "check the path") from error
    text = decode_text(data, str(path))
    if not text.strip():
        raise InputError(f"{path} is empty", hint)
    return text


def decode_text(data: bytes, origin: str) -> str:
    """Decode UTF-8 text as text files have it: without a byte order mark, every line end as `\\n`.

    Args:
        data: the text.
        origin: its origin for errors.

    Raises:
        InputError: it is not UTF-8.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{origin} is not UTF-8 text", "convert it first") from error
    return unify_line_ends(text)


def unify_line_ends(text: str) -> str:
    """Remove a byte order mark, and replace the line ends of Windows and of old Macintosh systems by `\\n`."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


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
