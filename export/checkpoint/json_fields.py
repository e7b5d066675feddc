"""Reading and checking single settings of config.json."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...models.json_file import MAX_COUNT, MAX_NUMBER, is_finite, is_whole, read_json_object, shown


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file of a checkpoint.

    Raises:
        CheckpointError: the file is absent, unreadable or not a JSON object.
    """
    if not os.path.exists(path):  # Path.exists raises for names that are too long
        raise CheckpointError(
            f"{path.parent} does not contain {path.name}", "give the folder of a Hugging Face checkpoint"
        )
    return read_json_object(path, CheckpointError, "download the checkpoint again")


def count(
    config: Mapping[str, Any], name: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_COUNT
) -> int:
    """Return an integer setting; `default` replaces one that is absent or null.

    Raises:
        CheckpointError: the value is not an integer from `minimum` to `maximum`.
    """
    value = config.get(name)
    value = default if value is None else value
    if value is None or not is_whole(value, minimum) or value > maximum:
        kind = "positive integer" if minimum == 1 else f"integer of at least {minimum}"
        kind += f", at most {maximum}" if value is not None and is_whole(value, maximum) else ""
        raise CheckpointError(
            f"config.json: {name} must be {'an' if kind.startswith('integer') else 'a'} {kind}, found {shown(value)}"
        )
    return value


def number(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Return a positive number; `default` replaces one that is absent or null.

    Raises:
        CheckpointError: the value is not a positive number.
    """
    value = optional_number(config, name)
    value = default if value is None else value
    if value is None or value <= 0:
        raise CheckpointError(f"config.json: {name} must be a positive number, found {shown(config.get(name))}")
    return value


def optional_number(config: Mapping[str, Any], name: str) -> float | None:
    """Return a number, or None where it is absent or null.

    Raises:
        CheckpointError: the value is not a number, not finite or too large.
    """
    value = config.get(name)
    if value is None:
        return None
    if not is_finite(value) or abs(value) > MAX_NUMBER:
        raise CheckpointError(f"config.json: {name} must be a number, at most {MAX_NUMBER:g}, found {shown(value)}")
    return float(value)


def optional_list(config: Mapping[str, Any], name: str, length: int) -> list[Any] | None:
    """Return a list of `length` entries, or None where it is absent or null.

    Raises:
        CheckpointError: the value is not a list, or has another length.
    """
    value = config.get(name)
    if value is None:
        return None
    if not isinstance(value, list):
        raise CheckpointError(f"config.json: {name} must be a list, found {shown(value)}")
    if len(value) != length:
        raise CheckpointError(f"config.json: {name} must have {length} entries, found {len(value)}")
    return value
