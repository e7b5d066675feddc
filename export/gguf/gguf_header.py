"""The header of a GGUF file: metadata by key, and where each tensor lies.

A GGUF file (version 2 or 3, little-endian) is the magic "GGUF", a version, two counts, that many pairs of key and typed
value, that many tensor entries (name, dimensions innermost first, type, offset) and, aligned, the tensors' bytes. The
format is specified in ggml's docs/gguf.md. Nothing in a file is believed before it is checked against the file's size:
every count, length and offset may lie.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from ...errors import CheckpointError
from ...models.json_file import shown

Scalar = int | float | bool | str
Value = Scalar | list[Scalar]

AGAIN: Final = "download the file again"

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_STRING: Final = 8
_ARRAY: Final = 9
_TRUTH: Final = 7
_NUMBERS: Final = {
    **dict(enumerate(("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))),
    **dict(enumerate(("<u8", "<i8", "<f8"), start=_ARRAY + 1)),
}
"""NumPy type by value type."""
_MOST_ENTRIES: Final = 1 << 16
"""Keys, and tensors: the largest models have a few thousand."""
_LONGEST_NAME: Final = 1 << 10
_LONGEST_STRING: Final = 1 << 24
_LONGEST_ARRAY: Final = 1 << 22
"""Elements: the largest vocabularies have a quarter of a million tokens, and twice as many merges."""
_LONGEST_HEADER: Final = 1 << 28
_MOST_DIMENSIONS: Final = 4
_DEFAULT_ALIGNMENT: Final = 32
_LARGEST_ALIGNMENT: Final = 1 << 20


@dataclass(frozen=True)
class StoredTensor:
    """Where and how a tensor is stored."""

    file: Path
    shape: tuple[int, ...]
    """Outermost dimension first, as everywhere here but in the file."""
    type: int
    """ggml's number of the type."""
    offset: int
    """In the file, bytes."""
    room: int
    """Bytes from there to the end of the file."""


@dataclass(frozen=True)
class GgufHeader:
    """The header of one file."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, StoredTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read a file's header; no weights yet.

    Raises:
        CheckpointError: it cannot be read, is not a little-endian GGUF file of version 2 or 3, or is damaged.
    """
    try:
        with path.open("rb") as file:
            return _Header(path, file).read()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist", "give a .gguf file or the folder of a checkpoint") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}", AGAIN) from error
    except _DamagedError as error:
        raise CheckpointError(f"{path} is damaged: {error}", AGAIN) from error


class _DamagedError(Exception):
    """The header says something that cannot be."""


class _Header:
    """Reads one header front to back."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._size = os.fstat(file.fileno()).st_size

    def read(self) -> GgufHeader:
        version = self._opening()
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self._path} is of GGUF version {version}", "supported are 2 and 3: convert the model again"
            )
        tensor_count, key_count = self._count(_MOST_ENTRIES, "the tensors"), self._count(_MOST_ENTRIES, "the keys")
        metadata: dict[str, Value] = {}
        for _ in range(key_count):
            key = self._string(_LONGEST_NAME, "a key")
            if key in metadata:
                raise _DamagedError(f"the key {shown(key)} is there twice")
            metadata[key] = self._value(key)
        entries = [self._entry() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= _LARGEST_ALIGNMENT:
            raise _DamagedError(f"general.alignment is {shown(alignment)}")
        start = -(-self._file.tell() // alignment) * alignment
        return GgufHeader(self._path, metadata, self._placed(entries, start, alignment))

    def _opening(self) -> int:
        opening = self._file.read(8)
        if len(opening) < 8 or opening[:4] != _MAGIC:
            raise CheckpointError(f"{self._path} is truncated or not a GGUF file", AGAIN)
        version = int.from_bytes(opening[4:], "little")
        if version & 0xFFFF == 0:  # the version's bytes are in the other order
            raise CheckpointError(
                f"{self._path} is a big-endian GGUF file", "get the little-endian one, or convert the model again"
            )
        return version

    def _value(self, key: str) -> Value:
        kind = self._whole("<I")
        if kind == _STRING:
            return self._string(_LONGEST_STRING, key)
        if kind != _ARRAY:
            return self._numbers(kind, 1, key)[0]
        kind, count = self._whole("<I"), self._count(_LONGEST_ARRAY, key)
        if kind == _STRING:
            return [self._string(_LONGEST_STRING, key) for _ in range(count)]
        return self._numbers(kind, count, key)

    def _numbers(self, kind: int, count: int, key: str) -> list[Scalar]:
        if kind not in _NUMBERS:
            raise _DamagedError(f"{shown(key)} is of the value type {kind}")
        dtype = np.dtype(_NUMBERS[kind])
        raw = self._bytes(count * dtype.itemsize)
        if kind == _TRUTH and raw.strip(b"\0\1"):
            raise _DamagedError(f"{shown(key)} is a truth value other than 0 and 1")
        values: list[Scalar] = np.frombuffer(raw, dtype).tolist()
        return values

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset of one tensor."""
        name = self._string(_LONGEST_NAME, "the name of a tensor")
        dimensions = self._whole("<I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise _DamagedError(f"{shown(name)} has {dimensions} dimensions")
        shape = tuple(self._whole("<Q") for _ in range(dimensions))[::-1]
        if 0 in shape:
            raise _DamagedError(f"{shown(name)} has the shape {list(shape)}")
        return name, shape, self._whole("<I"), self._whole("<Q")

    def _placed(
        self, entries: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> dict[str, StoredTensor]:
        tensors: dict[str, StoredTensor] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise _DamagedError(f"the tensor {shown(name)} is there twice")
            if offset % alignment:
                raise _DamagedError(f"{shown(name)} lies at offset {offset}, which is not a multiple of {alignment}")
            room = self._size - start - offset
            # No type has fewer than one bit a weight.
            if room <= 0 or math.prod(shape) > 8 * room:
                raise _DamagedError(f"{shown(name)} lies beyond its {self._size} bytes")
            tensors[name] = StoredTensor(self._path, shape, kind, start + offset, room)
        return tensors

    def _string(self, longest: int, what: str) -> str:
        length = self._whole("<Q")
        if length > longest:
            raise _DamagedError(f"{shown(what)} has {length} bytes")
        try:
            return self._bytes(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise _DamagedError(f"{shown(what)} is not UTF-8") from error

    def _count(self, most: int, what: str) -> int:
        count = self._whole("<Q")
        if count > most:
            raise _DamagedError(f"the count of {shown(what)} is {count}")
        return count

    def _whole(self, layout: str) -> int:
        (value,) = struct.unpack(layout, self._bytes(struct.calcsize(layout)))
        return int(value)

    def _bytes(self, count: int) -> bytes:
        if self._file.tell() + count > min(self._size, _LONGEST_HEADER):
            raise _DamagedError("its header ends too soon")
        raw = self._file.read(count)
        if len(raw) != count:
            raise _DamagedError("its header ends too soon")
        return raw
