"""Removing nodes that the outputs of a graph do not need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onnx import NodeProto


def needed_nodes(nodes: Sequence[NodeProto], outputs: Iterable[str]) -> list[NodeProto]:
    """Return the nodes on which `outputs` depend; `nodes` are in topological order."""
    needed = set(outputs)
    found = []
    for node in reversed(nodes):
        if needed.intersection(node.output):
            needed.update(node.input)
            found.append(node)
    return found[::-1]
