"""Which files an ONNX model keeps its weights in, read from the model before anything opens them.

A model names files beside it (`external_data` of a tensor, key `location`). A file that was made to harm may name any
path, so the names are checked here and not left to the runtime's version. The model is read as protobuf wire format,
following only the fields of onnx.proto that can hold a tensor.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Final

from ...errors import BundleError
from .wire import mapped_model, submessages

_FIELDS: Final[Mapping[str, Mapping[int, str]]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
}
"""Message fields that lead to tensors, by message and field number in onnx.proto."""
_DEEPEST: Final = 64
_NUMBER: Final = re.compile("[0-9]{1,18}")


def check_external_data(graph: Path) -> None:
    """Check that a model keeps its weights in files beside it, and that they are there, whole.

    Raises:
        BundleError: the file is not an ONNX model, names a file outside its folder, or one that is missing or too
            short.
    """
    for name, least in _needed(graph).items():
        windows = PureWindowsPath(name)
        if not name or windows.is_absolute() or windows.drive or windows.root or ".." in windows.parts:
            raise BundleError(f"{graph} keeps weights in {name!r}, outside its folder", "do not use this model")
        file = graph.parent / PurePosixPath(name)
        if not file.is_file():
            raise BundleError(f"{graph} keeps weights in {name}, which is missing", "copy the whole model folder")
        if (size := file.stat().st_size) < least:
            raise BundleError(f"{file} is damaged: {size} bytes, {least} expected", "copy the whole model folder")


def external_files(graph: Path) -> list[str]:
    """Names of the files that the tensors of a model refer to, sorted.

    Raises:
        BundleError: the file is not protobuf, so it is no ONNX model.
    """
    return sorted(_needed(graph))


def _needed(graph: Path) -> dict[str, int]:
    """The files that the tensors of a model refer to, sorted, and how many bytes each must have at the least."""
    needed: dict[str, int] = {}
    with mapped_model(graph) as data:
        for name, end in _tensors(data, 0, len(data), "model", 0):
            needed[name] = max(needed.get(name, 0), end)
    return dict(sorted(needed.items()))


def _tensors(data: mmap.mmap, start: int, end: int, message: str, depth: int) -> Iterator[tuple[str, int]]:
    """File and end in it of every tensor that lies outside the model; 0 where the model does not say the end."""
    if depth > _DEEPEST:
        raise ValueError("it is nested too deeply")
    said: dict[str, str] = {}
    for number, begin, stop in submessages(data, start, end):
        kind = _FIELDS[message].get(number)
        if kind == "entry":
            parts = {field: data[first:last].decode("utf-8") for field, first, last in submessages(data, begin, stop)}
            said[parts.get(1, "")] = parts.get(2, "")
        elif kind is not None:
            yield from _tensors(data, begin, stop, kind, depth + 1)
    if "location" in said:
        place = [said.get(key, "0") for key in ("offset", "length")]
        yield said["location"], sum(map(int, place)) if all(_NUMBER.fullmatch(each) for each in place) else 0
