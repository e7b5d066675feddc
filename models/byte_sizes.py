"""Numbers of bytes as people write and read them: 12 kB, 3.4 MB, 5.6 GB."""

from __future__ import annotations

import re
from typing import Final

from ..errors import InputError

_UNITS: Final = {
    "": 1,
    **{prefix: 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}i": 1024**power for power, prefix in enumerate("kmgt", 1)},
}
"""Bytes of a unit, by its prefix in lower case."""
_SIZE: Final = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(?:([kmgt]i?)b?|(b|bytes))", re.ASCII | re.IGNORECASE)
_MOST: Final = 1 << 60


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
