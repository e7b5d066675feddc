"""Reads ONNX files as protobuf wire format: external data and operators.

The runtime does not need the onnx package, and a model with inline weights may be as large as memory, so other fields
are skipped without reading them. https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Final

from ...errors import BundleError
from ..regular_file import open_regular

_FIELDS: Final[Mapping[str, Mapping[int, str]]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}
"""Message fields that lead to nodes and tensors, by message and field number in onnx.proto."""
_GRAPH: Final = 7  # of a model
_OUTPUT: Final = 12  # of a graph
_EXTERNAL_DATA: Final = 13  # of a tensor
_OPERATOR, _DOMAIN = 4, 7  # of a node
_DOMAIN_OF_FUNCTION: Final = 10
_MAX_DEPTH: Final = 64
_NUMBER: Final = re.compile("[0-9]{1,18}")


@dataclass(frozen=True)
class Operators:
    """Operators of a model's nodes, including those in subgraphs and functions."""

    used: frozenset[tuple[str, str]]
    """Domain (empty for ONNX's own) and name of each operator."""
    own_domains: frozenset[str]
    """Domains of the functions that the model contains."""

    def __contains__(self, operator: str) -> bool:
        """Return whether an operator of that name is used, in any domain."""
        return any(name == operator for _, name in self.used)


def operators_of(*graphs: Path) -> Operators:
    """Read the operators of a model's files without loading them.

    A graph that needs a custom operator library, or that was compiled for one device, fails to load with an unhelpful
    error; its operators show the reason.

    Raises:
        BundleError: a file is not an ONNX model.
    """
    used, domains = set(), set()
    for graph in graphs:
        with mapped_model(graph) as data:
            for kind, begin, stop in _messages(data, 0, len(data), "model", 0):
                if kind == "node":
                    domain, operator = _texts(data, begin, stop, _DOMAIN, _OPERATOR)
                    used.add(("" if domain == "ai.onnx" else domain, operator))
                elif kind == "function":
                    domains.update(_texts(data, begin, stop, _DOMAIN_OF_FUNCTION))
    return Operators(frozenset(used), frozenset(domains))


def outputs_of(graph: Path) -> frozenset[str]:
    """Read the names of a graph's outputs without loading it.

    Raises:
        BundleError: the file is not an ONNX model.
    """
    with mapped_model(graph) as data:
        graphs = [(begin, stop) for number, begin, stop in _submessages(data, 0, len(data)) if number == _GRAPH]
        values = [each for begin, stop in graphs for each in _submessages(data, begin, stop) if each[0] == _OUTPUT]
        return frozenset(_texts(data, begin, stop, 1)[0] for _, begin, stop in values)


def check_external_data(graph: Path) -> None:
    """Check that the external data files of a model lie in its folder, exist and are long enough.

    A malicious model may name any path, so the names are checked here instead of relying on the runtime's version.

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


def _required_sizes(graph: Path) -> dict[str, int]:
    """Return the minimum size in bytes of each external data file, sorted by name; 0 if the model does not give it."""
    sizes: dict[str, int] = {}
    with mapped_model(graph) as data:
        for kind, begin, stop in _messages(data, 0, len(data), "model", 0):
            if kind != "tensor":
                continue
            entries = dict(
                _texts(data, first, last, 1, 2)
                for number, first, last in _submessages(data, begin, stop)
                if number == _EXTERNAL_DATA
            )
            if (name := entries.get("location")) is not None:
                numbers = [entries.get(key, "0") for key in ("offset", "length")]
                end = sum(map(int, numbers)) if all(_NUMBER.fullmatch(each) for each in numbers) else 0
                sizes[name] = max(sizes.get(name, 0), end)
    return dict(sorted(sizes.items()))


def _messages(data: mmap.mmap, start: int, end: int, kind: str, depth: int) -> Iterator[tuple[str, int, int]]:
    """Yield kind, begin and end of every message inside one that `_FIELDS` leads to, an outer message first."""
    if depth > _MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    for number, begin, stop in _submessages(data, start, end):
        if (inner := _FIELDS[kind].get(number)) is not None:
            yield inner, begin, stop
            if inner in _FIELDS:
                yield from _messages(data, begin, stop, inner, depth + 1)


def _texts(data: mmap.mmap, start: int, end: int, *wanted: int) -> list[str]:
    """The texts of some fields, the last one of a field that is repeated; empty where there is none."""
    places = {number: slice(begin, stop) for number, begin, stop in _submessages(data, start, end)}
    return [data[places[number]].decode("utf-8") if number in places else "" for number in wanted]


def _submessages(data: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int]]:
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
