"""Giving a graph the weights of another file: tensors of one model written over those of the same name in another.

Weights packed for a machine lie in a file of their own, of which each tensor of the packed graph says where (and where
its packed form is). A second graph over the same weights finds them by the same words. As `onnx_wire` reads, so this
writes: protobuf wire format, with everything that is not replaced byte for byte as it was.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from .wire import mapped_model, submessages

_GRAPH: Final = 7  # of a model
_TENSOR: Final = 5  # of a graph
_NAME, _ELSEWHERE = 8, 13  # of a tensor
_LENGTH_DELIMITED: Final = 2


def with_tensors_of(graph: Path, other: Path) -> bytes:
    """The model in `graph`, each of whose weights in another file is replaced by the tensor of its name in `other`.

    Raises:
        BundleError: one of the files is not an ONNX model.
        KeyError: `other` has no tensor of such a name.
    """
    with mapped_model(other) as data:
        theirs = {
            _name(data, begin, stop): data[begin:stop]
            for first, last in _fields(data, 0, len(data), _GRAPH)
            for begin, stop in _fields(data, first, last, _TENSOR)
        }
    with mapped_model(graph) as data:

        def tensor(start: int, end: int) -> bytes:
            elsewhere = any(True for _ in _fields(data, start, end, _ELSEWHERE))
            return theirs[_name(data, start, end)] if elsewhere else data[start:end]

        def tensors(start: int, end: int) -> bytes:
            return _with_each(data, start, end, _TENSOR, tensor)

        return _with_each(data, 0, len(data), _GRAPH, tensors)


def _fields(data: mmap.mmap, start: int, end: int, wanted: int) -> Iterator[tuple[int, int]]:
    return ((begin, stop) for number, begin, stop in submessages(data, start, end) if number == wanted)


def _name(data: mmap.mmap, start: int, end: int) -> str:
    return next((data[begin:stop].decode("utf-8") for begin, stop in _fields(data, start, end, _NAME)), "")


def _with_each(data: mmap.mmap, start: int, end: int, wanted: int, change: Callable[[int, int], bytes]) -> bytes:
    """The message in `data[start:end]` with every field of one number replaced by what `change` makes of it."""
    pieces: list[bytes] = []
    at = start
    for begin, stop in _fields(data, start, end, wanted):
        header = _header(wanted, stop - begin)
        if data[begin - len(header) : begin] != header:
            raise ValueError("a length is not written the shortest way")
        body = change(begin, stop)
        pieces += [data[at : begin - len(header)], _header(wanted, len(body)), body]
        at = stop
    return b"".join([*pieces, data[at:end]])


def _header(number: int, size: int) -> bytes:
    return _varint(number << 3 | _LENGTH_DELIMITED) + _varint(size)


def _varint(value: int) -> bytes:
    written = bytearray()
    while value >= 0x80:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*written, value])
