"""Lists the operators of a model file without loading it.

A graph that needs a custom operator library, or that was compiled for one device, fails to load with an unhelpful
error; its operators show the reason.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .wire import mapped_model, submessages

_MAX_DEPTH: Final = 64
_GRAPH, _FUNCTION = 7, 25  # of a model
_NODE_OF_GRAPH, _NODE_OF_FUNCTION = 1, 7
_OPERATOR, _ATTRIBUTE, _DOMAIN = 4, 5, 7  # of a node
_SUBGRAPHS = (6, 11)  # of an attribute
_DOMAIN_OF_FUNCTION: Final = 10


@dataclass(frozen=True)
class Operators:
    """Operators of a model's nodes, including those in subgraphs and functions."""

    used: frozenset[tuple[str, str]]
    """Domain (empty for ONNX's own) and name of each operator."""
    own_domains: frozenset[str]
    """Domains of the functions that the model contains."""

    def __or__(self, other: Operators) -> Operators:
        """Return those of both."""
        return Operators(self.used | other.used, self.own_domains | other.own_domains)

    def __contains__(self, operator: str) -> bool:
        """Return whether an operator of that name is used, in any domain."""
        return any(name == operator for _, name in self.used)


def operators_of(graph: Path) -> Operators:
    """Read the operators of a model file.

    Raises:
        BundleError: the file is not an ONNX model.
    """
    used: set[tuple[str, str]] = set()
    domains: set[str] = set()
    with mapped_model(graph) as data:
        for number, begin, stop in submessages(data, 0, len(data)):
            if number == _GRAPH:
                used.update(_in_nodes(data, begin, stop, _NODE_OF_GRAPH, 0))
            elif number == _FUNCTION:
                used.update(_in_nodes(data, begin, stop, _NODE_OF_FUNCTION, 0))
                domains.update(
                    data[first:last].decode("utf-8")
                    for field, first, last in submessages(data, begin, stop)
                    if field == _DOMAIN_OF_FUNCTION
                )
    return Operators(frozenset(used), frozenset(domains))


def _in_nodes(data: mmap.mmap, start: int, end: int, field_of_nodes: int, depth: int) -> Iterator[tuple[str, str]]:
    if depth > _MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    for number, begin, stop in submessages(data, start, end):
        if number == field_of_nodes:
            yield from _in_node(data, begin, stop, depth)


def _in_node(data: mmap.mmap, start: int, end: int, depth: int) -> Iterator[tuple[str, str]]:
    operator = domain = ""
    for number, begin, stop in submessages(data, start, end):
        if number == _OPERATOR:
            operator = data[begin:stop].decode("utf-8")
        elif number == _DOMAIN:
            domain = data[begin:stop].decode("utf-8")
        elif number == _ATTRIBUTE:
            for kind, first, last in submessages(data, begin, stop):
                if kind in _SUBGRAPHS:
                    yield from _in_nodes(data, first, last, _NODE_OF_GRAPH, depth + 1)
    yield "" if domain == "ai.onnx" else domain, operator
