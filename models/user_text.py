"""Text from and for people: files of text, numbers of bytes, and what a terminal may show."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..errors import InputError
from .regular_file import MAX_TEXT_BYTES, read_regular_or_substitution

_UNITS: Final = {
    "": 1,
    **{prefix: 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}i": 1024**power for power, prefix in enumerate("kmgt", 1)},
}
"""Bytes of a unit, by its prefix in lower case."""
_SIZE: Final = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(?:([kmgt]i?)b?|(b|bytes))", re.ASCII | re.IGNORECASE)
_MOST: Final = 1 << 60
_REPLACEMENT: Final = "\ufffd"
_CONTROLS: Final = dict.fromkeys(
    [
        *(code for code in range(0x20) if chr(code) not in "\n\t"),
        *range(0x7F, 0xA0),  # DEL and C1; many terminals take U+009B for the beginning of an escape sequence
        *range(0x202A, 0x202F),  # bidirectional embeddings and overrides, which reorder what stands around them
        *range(0x2066, 0x206A),  # bidirectional isolates
    ],
    _REPLACEMENT,
)
_LINE_ENDS: Final = dict.fromkeys(map(ord, "\n\t"), _REPLACEMENT)


def read_text(path: Path, hint: str = "give a file with at least one prompt", *, blank: bool = False) -> str:
    """Read a UTF-8 text file, or a shell's process substitution; see `decode_text`.

    Args:
        path: path of the file.
        hint: what to do about a file that is blank.
        blank: whether the file may be blank.

    Raises:
        InputError: the file cannot be read, is not UTF-8, or is blank where it may not be.
    """
    try:
        data = read_regular_or_substitution(path.expanduser(), MAX_TEXT_BYTES)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise InputError(f"{path} cannot be read: {reason or error}", "check the path") from error
    except ValueError as error:
        raise InputError(f"{str(path)!r} is not a path: {error}", "check the path") from error
    text = decode_text(data, str(path))
    if not blank and not text.strip():
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


def format_bytes(count: int) -> str:
    """Format a number of bytes for people: 12 kB, 3.4 MB, 5.6 GB."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count // size} {unit}"
    return f"{max(count, 0)} bytes"


def parse_bytes(text: str, option: str) -> int:
    """Read a size such as `512MB`, `1.5 GB`, `2GiB` or `0`. Only 0 needs no unit, so that nobody means megabytes.

    Args:
        text: what the user wrote, in upper or lower case.
        option: name of the option, for the error.

    Raises:
        InputError: it is not a size.
    """
    if text.strip() == "0":
        return 0
    match = _SIZE.fullmatch(text.strip())
    count = -1 if match is None else int(float(match[1]) * _UNITS[(match[2] or "").lower()])
    if not 0 <= count <= _MOST:
        raise InputError(f"{option} is {text!r:.60}", "write a number and a unit, such as 512MB, 2GB or 1.5GiB, or 0")
    return count


def for_terminal(text: str) -> str:
    """Replace control characters by U+FFFD, so that text of unknown origin cannot control the terminal.

    Line ends and tabs stay. Every escape sequence begins with a character that is replaced; the rest of it is shown.
    """
    return text.translate(_CONTROLS)


def on_one_line(text: str) -> str:
    """`for_terminal` for text that must stay on its line: line ends and tabs are replaced too."""
    return for_terminal(text).translate(_LINE_ENDS)
