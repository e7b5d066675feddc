"""Reading config.json: every setting is checked where it is read, and what is wrong is said in one line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ...errors import CheckpointError
from ...models.json_file import is_finite, is_whole, read_json_object, shown

LARGEST_COUNT: Final = (1 << 31) - 1
"""Of a whole number in config.json: the graph's operators count in 32 bits."""
LARGEST_NUMBER: Final = 1e30
"""Of a real number in config.json; larger ones mean nothing and their powers overflow."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint.

    Raises:
        CheckpointError: the file is absent, unreadable or not a JSON object.
    """
    if not os.path.exists(path):  # Path.exists raises for names that are too long
        raise CheckpointError(f"{path.parent} holds no {path.name}", "give the folder of a Hugging Face checkpoint")
    return read_json_object(path, CheckpointError, "download the checkpoint again")


def count(
    config: Mapping[str, Any], name: str, default: int | None = None, least: int = 1, most: int = LARGEST_COUNT
) -> int:
    """A whole number; `default` stands for one that is absent or null.

    Raises:
        CheckpointError: it is none, or not from `least` to `most`.
    """
    value = config.get(name)
    value = default if value is None else value
    if value is None or not is_whole(value, least) or value > most:
        kind = "positive whole number" if least == 1 else f"whole number of at least {least}"
        kind += f", at most {most}" if value is not None and is_whole(value, most) else ""
        raise CheckpointError(f"config.json: {name} must be a {kind}, found {shown(value)}")
    return value


def number(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A number above zero; `default` stands for one that is absent or null.

    Raises:
        CheckpointError: it is none.
    """
    value = optional_number(config, name)
    value = default if value is None else value
    if value is None or value <= 0:
        raise CheckpointError(f"config.json: {name} must be a positive number, found {shown(config.get(name))}")
    return value


def optional_number(config: Mapping[str, Any], name: str) -> float | None:
    """A number, or None where it is absent or null.

    Raises:
        CheckpointError: it is not a number, not finite or too large.
    """
    value = config.get(name)
    if value is None:
        return None
    if not is_finite(value) or abs(value) > LARGEST_NUMBER:
        raise CheckpointError(f"config.json: {name} must be a number, at most {LARGEST_NUMBER:g}, found {shown(value)}")
    return float(value)


def optional_list(config: Mapping[str, Any], name: str, length: int) -> list[Any] | None:
    """A list of that many entries, or None where it is absent or null.

    Raises:
        CheckpointError: it is not a list, or of another length.
    """
    value = config.get(name)
    if value is None:
        return None
    if not isinstance(value, list):
        raise CheckpointError(f"config.json: {name} must be a list, found {shown(value)}")
    if len(value) != length:
        raise CheckpointError(f"config.json: {name} must have {length} entries, found {len(value)}")
    return value
