"""Typed access to the metadata of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from ...errors import CheckpointError
from ...models.json_file import is_finite, is_whole, shown
from .gguf_header import Value

_MAX_COUNT: Final = (1 << 31) - 1
_MAX_NUMBER: Final = 1e30
_Item = TypeVar("_Item", str, float, int)


class GgufMetadata:
    """The metadata of a file. An absent key gives None, an unusable value raises CheckpointError."""

    def __init__(self, path: Path, values: Mapping[str, Value]) -> None:
        self.path = path
        self._values = values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def count(self, key: str, minimum: int = 0) -> int | None:
        """An integer of at least `minimum`; a list that repeats one number counts as that number."""
        value = self._values.get(key)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if value is None or (isinstance(value, int) and is_whole(value, minimum) and value <= _MAX_COUNT):
            return value
        raise self.wrong(f"{key} is {shown(value)}", f"it must be one integer of at least {minimum}")

    def required_count(self, key: str, minimum: int = 1) -> int:
        """An integer of at least `minimum` that is required."""
        value = self.count(key, minimum)
        if value is None:
            raise self.missing(key)
        return value

    def number(self, key: str) -> float | None:
        """A real number; a float32 is read as the shortest decimal that rounds to it (1e-05, not 9.99e-06)."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, (int, float)) or not is_finite(value) or abs(value) > _MAX_NUMBER:
            raise self.wrong(f"{key} is {shown(value)}", "it must be a number")
        narrow = np.float32(value)
        return float(str(narrow)) if float(narrow) == value else float(value)

    def positive(self, key: str) -> float | None:
        """A positive real number."""
        value = self.number(key)
        if value is not None and value <= 0:
            raise self.wrong(f"{key} is {shown(value)}", "it must be greater than zero")
        return value

    def flag(self, key: str) -> bool | None:
        """A boolean."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(f"{key} is {shown(value)}", "it must be true or false")
        return value

    def text(self, key: str) -> str | None:
        """A string."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(f"{key} is {shown(value)}", "it must be text")
        return value

    def texts(self, key: str) -> list[str] | None:
        """A list of strings."""
        return self._list(key, str)

    def numbers(self, key: str) -> list[float] | None:
        """A list of real numbers without NaN."""
        values = self._list(key, float)
        if values is not None and any(map(math.isnan, values)):
            raise self.wrong(f"{key} holds NaN", "download the file again")
        return values

    def counts(self, key: str) -> list[int] | None:
        """A list of integers."""
        return self._list(key, int)

    def missing(self, key: str) -> CheckpointError:
        """The error for a required key that is absent."""
        return CheckpointError(
            f"{self.path} does not contain a complete language model: {key} is missing", "convert the model again"
        )

    def wrong(self, what: str, hint: str) -> CheckpointError:
        """The error for an unusable value."""
        return CheckpointError(f"{self.path}: {what}", hint)

    def _list(self, key: str, kind: type[_Item]) -> list[_Item] | None:
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.wrong(f"{key} is {shown(value)}", "it must be a list")
        items = [item for item in value if type(item) is kind]
        if len(items) != len(value):
            raise self.wrong(f"{key} is {shown(value)}", f"it must be a list of {kind.__name__}")
        return items
