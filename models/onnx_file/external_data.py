"""Finds and checks the external data files of an ONNX model.

A model names files beside it (`external_data` of a tensor, key `location`). A malicious file may name any path, so the
names are checked here instead of relying on the runtime's version. The model is read as protobuf wire format, following
only the fields of onnx.proto that can hold a tensor.
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
_MAX_DEPTH: Final = 64
_NUMBER: Final = re.compile("[0-9]{1,18}")


def check_external_data(graph: Path) -> None:
    """Check that the external data files of a model lie in its folder, exist and are long enough.

    Raises:
        BundleError: the file is not an ONNX model, or names a file that lies outside its folder, is missing or is too
            short.
    """
    for name, minimum in _required_sizes(graph).items():
        windows = PureWindowsPath(name)
        if not name or windows.is_absolute() or windows.drive or windows.root or ".." in windows.parts:
            raise BundleError(f"{graph} keeps weights in {name!r}, outside its folder", "do not use this model")
        file = graph.parent / PurePosixPath(name)
        if not file.is_file():
            raise BundleError(f"{graph} keeps weights in {name}, which is missing", "copy the whole model folder")
        if (size := file.stat().st_size) < minimum:
            raise BundleError(f"{file} is damaged: {size} bytes, {minimum} expected", "copy the whole model folder")


def external_files(graph: Path) -> list[str]:
    """List the external data files of a model, sorted by name.

    Raises:
        BundleError: the file is not an ONNX model.
    """
    return sorted(_required_sizes(graph))


def _required_sizes(graph: Path) -> dict[str, int]:
    """Return the minimum size in bytes of each external data file, sorted by name."""
    sizes: dict[str, int] = {}
    with mapped_model(graph) as data:
        for name, end in _tensors(data, 0, len(data), "model", 0):
            sizes[name] = max(sizes.get(name, 0), end)
    return dict(sorted(sizes.items()))


def _tensors(data: mmap.mmap, start: int, end: int, message: str, depth: int) -> Iterator[tuple[str, int]]:
    """Yield file name and end offset of every external tensor; the offset is 0 if the model does not give it."""
    if depth > _MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    entries: dict[str, str] = {}
    for number, begin, stop in submessages(data, start, end):
        kind = _FIELDS[message].get(number)
        if kind == "entry":
            parts = {field: data[first:last].decode("utf-8") for field, first, last in submessages(data, begin, stop)}
            entries[parts.get(1, "")] = parts.get(2, "")
        elif kind is not None:
            yield from _tensors(data, begin, stop, kind, depth + 1)
    if "location" in entries:
        numbers = [entries.get(key, "0") for key in ("offset", "length")]
        yield entries["location"], sum(map(int, numbers)) if all(_NUMBER.fullmatch(each) for each in numbers) else 0
