"""ONNX files read as protobuf wire format, without decoding more than is asked for.

The runtime does without the onnx package, and a model whose weights are inline may be as large as memory: fields that
do not matter are skipped unread. https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import BundleError


@contextmanager
def mapped_model(graph: Path) -> Iterator[mmap.mmap]:
    """The bytes of a model file; what its reader finds wrong with them is the file's fault.

    Raises:
        BundleError: the file is not protobuf, so it is no ONNX model.
    """
    try:
        if graph.stat().st_size == 0:
            raise ValueError("it is empty")
        with graph.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data
    except (ValueError, IndexError, UnicodeDecodeError) as error:
        raise BundleError(f"{graph} is not an ONNX model: {error}", "give a complete .onnx file") from error


def submessages(data: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Field number, begin and end of every length-delimited field of the message in `data[start:end]`.

    Raises:
        ValueError: that is not a message.
    """
    at = start
    while at < end:
        tag, at = _varint(data, at, end)
        number, wire = tag >> 3, tag & 7
        if number == 0:
            raise ValueError("a field has the number 0")
        if wire == 0:
            _, at = _varint(data, at, end)
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        elif wire == 2:
            size, at = _varint(data, at, end)
            if size > end - at:
                raise ValueError("it ends too early")
            yield number, at, at + size
            at += size
        else:
            raise ValueError(f"a field has the unknown wire type {wire}")
    if at != end:
        raise ValueError("it ends too early")


def _varint(data: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("it ends too early")
