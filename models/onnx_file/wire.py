"""Reading and writing ONNX files as protobuf wire format.

The runtime does not need the onnx package, and a model with inline weights may be as large as memory, so other fields
are skipped without reading them. https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import BundleError
from ..regular_file import open_regular


@contextmanager
def mapped_model(graph: Path) -> Iterator[mmap.mmap]:
    """Map a model file into memory; errors of the block that reads it become a `BundleError`.

    Raises:
        BundleError: the file is not an ONNX model.
    """
    try:
        if graph.stat().st_size == 0:
            raise ValueError("it is empty")
        with open_regular(graph) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data
    except (ValueError, IndexError, UnicodeDecodeError) as error:
        raise BundleError(f"{graph} is not an ONNX model: {error}", "give a complete .onnx file") from error


def submessages(data: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield field number, begin and end of every length-delimited field of the message in `data[start:end]`.

    Raises:
        ValueError: the bytes are not a message.
    """
    at = start
    while at < end:
        tag, at = _read_varint(data, at, end)
        number, wire = tag >> 3, tag & 7
        if number == 0:
            raise ValueError("a field has the number 0")
        if wire == 0:
            _, at = _read_varint(data, at, end)
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        elif wire == 2:
            size, at = _read_varint(data, at, end)
            if size > end - at:
                raise ValueError("it ends too early")
            yield number, at, at + size
            at += size
        else:
            raise ValueError(f"a field has the unknown wire type {wire}")
    if at != end:
        raise ValueError("it ends too early")


def _read_varint(data: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("it ends too early")


def field_header(number: int, size: int) -> bytes:
    """Encode the header of a length-delimited field."""
    return _varint(number << 3 | 2) + _varint(size)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])
