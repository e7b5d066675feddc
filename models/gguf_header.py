"""The header of a GGUF file: tensor positions, and metadata with typed access.

A GGUF file (version 2 or 3, little-endian) consists of the magic "GGUF", a version, two counts, the key-value pairs,
the tensor entries (name, dimensions innermost first, type, offset) and, aligned, the bytes of the tensors (Source:
ggml, docs/gguf.md). Every count, length and offset is checked against the size of the file before it is used, because
the file may be damaged (docs/decisions/0029-gguf-reader.md).
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, TypeVar

import numpy as np

from ..errors import CheckpointError
from .json_file import MAX_COUNT, MAX_NUMBER, is_finite, is_whole, shown
from .regular_file import open_regular

Scalar = int | float | bool | str
Value = Scalar | list[Scalar]

AGAIN: Final = "download the file again"

_MAGIC: Final = b"GGUF"
_STRING: Final = 8
_ARRAY: Final = 9
_BOOLEAN: Final = 7
_NUMBERS: Final = {
    **dict(enumerate(("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))),
    **dict(enumerate(("<u8", "<i8", "<f8"), start=_ARRAY + 1)),
}
"""NumPy type by value type."""
_MAX_ENTRIES: Final = 1 << 16
"""Limit on the number of keys, and of tensors; the largest models have a few thousand."""
_MAX_NAME_BYTES: Final = 1 << 10
_MAX_STRING_BYTES: Final = 1 << 24
_MAX_ARRAY_ELEMENTS: Final = 1 << 22
"""Limit on array elements; the largest vocabularies have about 260,000 tokens and twice as many merges."""
_MAX_HEADER_BYTES: Final = 1 << 28
_MAX_DIMENSIONS: Final = 4
_DEFAULT_ALIGNMENT: Final = 32
_MAX_ALIGNMENT: Final = 1 << 20
_Item = TypeVar("_Item")


class StoredTensor(NamedTuple):
    """Position and type of a tensor."""

    file: Path
    shape: tuple[int, ...]
    """Outermost dimension first; the file has the opposite order."""
    type: int
    """The type's number in ggml."""
    offset: int
    """Position of the first byte in the file."""
    available_bytes: int
    """Number of bytes from `offset` to the end of the file."""


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of a file, without its weights.

    Raises:
        CheckpointError: the file cannot be read, is damaged, or is not a little-endian GGUF file of version 2 or 3.
    """
    try:
        with open_regular(path) as file:
            return _HeaderParser(path, file).read()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist", "give a .gguf file or the folder of a checkpoint") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}", AGAIN) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}", AGAIN) from error


class _HeaderParser:
    """Parses a header from front to back."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._size = os.fstat(file.fileno()).st_size

    def read(self) -> GgufHeader:
        start = self._file.read(8)
        if len(start) < 8 or start[:4] != _MAGIC:
            raise CheckpointError(f"{self._path} is truncated or not a GGUF file", AGAIN)
        version = int.from_bytes(start[4:], "little")
        if version & 0xFFFF == 0:  # the bytes of the version are swapped
            raise CheckpointError(
                f"{self._path} is a big-endian GGUF file", "get the little-endian one, or convert the model again"
            )
        if version not in (2, 3):
            raise CheckpointError(
                f"{self._path} has GGUF version {version}", "supported are 2 and 3: convert the model again"
            )
        tensor_count, key_count = self._count(_MAX_ENTRIES, "the tensors"), self._count(_MAX_ENTRIES, "the keys")
        metadata: dict[str, Value] = {}
        for _ in range(key_count):
            key = self._string(_MAX_NAME_BYTES, "a key")
            if key in metadata:
                raise ValueError(f"the key {shown(key)} occurs twice")
            metadata[key] = self._value(key)
        entries = [self._entry() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT:
            raise ValueError(f"general.alignment is {shown(alignment)}")
        return GgufHeader(self._path, metadata, self._stored_tensors(entries, alignment))

    def _value(self, key: str) -> Value:
        value_type = self._integer("<I")
        if value_type == _STRING:
            return self._string(_MAX_STRING_BYTES, key)
        if value_type != _ARRAY:
            return self._numbers(value_type, 1, key)[0]
        value_type, count = self._integer("<I"), self._count(_MAX_ARRAY_ELEMENTS, key)
        if value_type == _STRING:
            return [self._string(_MAX_STRING_BYTES, key) for _ in range(count)]
        return self._numbers(value_type, count, key)

    def _numbers(self, value_type: int, count: int, key: str) -> list[Scalar]:
        if value_type not in _NUMBERS:
            raise ValueError(f"{shown(key)} has the unknown value type {value_type}")
        dtype = np.dtype(_NUMBERS[value_type])
        raw = self._bytes(count * dtype.itemsize)
        if value_type == _BOOLEAN and raw.strip(b"\0\1"):
            raise ValueError(f"{shown(key)} holds a boolean other than 0 and 1")
        values: list[Scalar] = np.frombuffer(raw, dtype).tolist()
        return values

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Parse one tensor entry: name, shape, type and offset."""
        name = self._string(_MAX_NAME_BYTES, "the name of a tensor")
        dimensions = self._integer("<I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"{shown(name)} has {dimensions} dimensions")
        shape = tuple(self._integer("<Q") for _ in range(dimensions))[::-1]
        if 0 in shape:
            raise ValueError(f"{shown(name)} has the shape {list(shape)}")
        return name, shape, self._integer("<I"), self._integer("<Q")

    def _stored_tensors(
        self, entries: list[tuple[str, tuple[int, ...], int, int]], alignment: int
    ) -> dict[str, StoredTensor]:
        start = -(-self._file.tell() // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for name, shape, tensor_type, offset in entries:
            if name in tensors:
                raise ValueError(f"the tensor {shown(name)} occurs twice")
            if offset % alignment:
                raise ValueError(f"{shown(name)} has offset {offset}, which is not a multiple of {alignment}")
            available = self._size - start - offset
            # Every type takes at least one bit per weight.
            if available <= 0 or math.prod(shape) > 8 * available:
                raise ValueError(f"{shown(name)} extends beyond the end of the file")
            tensors[name] = StoredTensor(self._path, shape, tensor_type, start + offset, available)
        return tensors

    def _string(self, limit: int, what: str) -> str:
        length = self._integer("<Q")
        if length > limit:
            raise ValueError(f"{shown(what)} has {length} bytes")
        try:
            return self._bytes(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{shown(what)} is not UTF-8") from error

    def _count(self, limit: int, what: str) -> int:
        count = self._integer("<Q")
        if count > limit:
            raise ValueError(f"the count of {shown(what)} is {count}")
        return count

    def _integer(self, layout: str) -> int:
        (value,) = struct.unpack(layout, self._bytes(struct.calcsize(layout)))
        return int(value)

    def _bytes(self, count: int) -> bytes:
        ends_inside = self._file.tell() + count <= min(self._size, _MAX_HEADER_BYTES)
        if not ends_inside or len(raw := self._file.read(count)) != count:
            raise ValueError("the header is cut off")
        return raw


@dataclass(frozen=True)
class GgufHeader:
    """The header of a file; of all parts together where the model is split.

    Of the metadata, an absent key gives None, an unusable value raises CheckpointError.
    """

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)

    def required(self, read: Callable[[str], _Item | None], key: str) -> _Item:
        """What `read`, one of the methods below, returns for a required key."""
        value = read(key)
        if value is None:
            raise self.missing(key)
        return value

    def count(self, key: str, minimum: int = 0) -> int | None:
        """An integer of at least `minimum`; a list that repeats one number counts as that number."""
        value = self.metadata.get(key)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if value is None or (isinstance(value, int) and is_whole(value, minimum) and value <= MAX_COUNT):
            return value
        raise self.wrong(f"{key} is {shown(value)}", f"it must be one integer of at least {minimum}")

    def required_count(self, key: str, minimum: int = 1) -> int:
        """An integer of at least `minimum` that is required."""
        return self.required(lambda each: self.count(each, minimum), key)

    def number(self, key: str) -> float | None:
        """A real number; a float32 is read as the shortest decimal that rounds to it (1e-05, not 9.99e-06)."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, (int, float)) or not is_finite(value) or abs(value) > MAX_NUMBER:
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
        return self._of_kind(key, bool, "true or false")

    def text(self, key: str) -> str | None:
        """A string."""
        return self._of_kind(key, str, "text")

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

    def missing(self, key: str, hint: str = "convert the model again") -> CheckpointError:
        """The error for a required key or tensor that is absent."""
        return CheckpointError(f"{self.path} does not contain a complete language model: {key} is missing", hint)

    def wrong(self, what: str, hint: str) -> CheckpointError:
        """The error for an unusable value."""
        return CheckpointError(f"{self.path}: {what}", hint)

    def _of_kind(self, key: str, kind: type[_Item], expected: str) -> _Item | None:
        value = self.metadata.get(key)
        if value is None or isinstance(value, kind):
            return value
        raise self.wrong(f"{key} is {shown(value)}", f"it must be {expected}")

    def _list(self, key: str, kind: type[_Item]) -> list[_Item] | None:
        value = self._of_kind(key, list, "a list")
        if value is None or all(type(item) is kind for item in value):
            return value
        raise self.wrong(f"{key} is {shown(value)}", f"it must be a list of {kind.__name__}")
