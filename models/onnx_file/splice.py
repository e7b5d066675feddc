"""Replaces the external tensors of one model file by those of another.

The tensors of a prepacked graph refer to the packed weights in its data file. A second graph over the same weights uses
them through the same references. Everything else in the file stays the same byte for byte.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from .wire import field_header, mapped_model, submessages

_GRAPH: Final = 7  # of a model
_TENSOR: Final = 5  # of a graph
_NAME, _EXTERNAL_DATA = 8, 13  # of a tensor


def with_tensors_of(graph: Path, other: Path) -> bytes:
    """Return the model in `graph`, with each external tensor replaced by the tensor of that name in `other`.

    Raises:
        BundleError: one of the files is not an ONNX model.
        KeyError: `other` lacks a tensor.
    """
    with mapped_model(other) as data:
        replacements = {
            _name(data, begin, stop): data[begin:stop]
            for first, last in _fields(data, 0, len(data), _GRAPH)
            for begin, stop in _fields(data, first, last, _TENSOR)
        }
    with mapped_model(graph) as data:

        def tensor(start: int, end: int) -> bytes:
            external = any(True for _ in _fields(data, start, end, _EXTERNAL_DATA))
            return replacements[_name(data, start, end)] if external else data[start:end]

        def tensors(start: int, end: int) -> bytes:
            return _replace_fields(data, start, end, _TENSOR, tensor)

        return _replace_fields(data, 0, len(data), _GRAPH, tensors)


def _fields(data: mmap.mmap, start: int, end: int, wanted: int) -> Iterator[tuple[int, int]]:
    return ((begin, stop) for number, begin, stop in submessages(data, start, end) if number == wanted)


def _name(data: mmap.mmap, start: int, end: int) -> str:
    return next((data[begin:stop].decode("utf-8") for begin, stop in _fields(data, start, end, _NAME)), "")


def _replace_fields(
    data: mmap.mmap, start: int, end: int, wanted: int, replacement: Callable[[int, int], bytes]
) -> bytes:
    """Return the message in `data[start:end]` with every field of one number replaced."""
    pieces: list[bytes] = []
    copied = start
    for begin, stop in _fields(data, start, end, wanted):
        header = field_header(wanted, stop - begin)
        if data[begin - len(header) : begin] != header:
            raise ValueError("a length is not encoded in the shortest way")
        body = replacement(begin, stop)
        pieces += [data[copied : begin - len(header)], field_header(wanted, len(body)), body]
        copied = stop
    return b"".join([*pieces, data[copied:end]])
