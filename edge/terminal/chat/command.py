"""A command of the chat, and what its argument may be."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ....errors import InputError

TABLE_WIDTH: Final = 60
"""Number of columns below which lists are lines instead of tables."""


@dataclass(frozen=True)
class Command:
    """A command of the chat."""

    name: str
    argument: str
    """What its argument is called; empty if it takes none."""
    summary: str
    run: Callable[[str], None]
    candidates: Callable[[], Iterable[str]] = tuple
    """What its argument may be, for completion."""
    takes_path: bool = False


def typed_path(text: str) -> Path:
    """The path that a user writes, which may begin with a home folder, or stand in quotes."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    return Path(os.path.expanduser(text))  # unlike Path.expanduser, does not raise for an unknown user


def listed_number(text: str, most: int) -> int:
    """A number of a list.

    Raises:
        InputError: the list has no such number.
    """
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= most):
        raise InputError(f"there is no number {text!r:.40}", f"write a number from 1 to {most}")
    return int(text)
