"""How long a text a graph can read: as long as its tables of positions."""

from __future__ import annotations

from typing import Final

from .decoder_io import POSITIONS
from .edit.editable import EditableGraph, Node

_TABLES: Final = {"GroupQueryAttention": 7}
"""Input with the cosines, by operator."""


def longest_text(graph: EditableGraph) -> int | None:
    """Rows of the shortest table that positions are looked up in; None where there is none."""
    rows = [table for node in graph.nodes if (table := _rows(graph, node)) is not None]
    return min(rows, default=None)


def _rows(graph: EditableGraph, node: Node) -> int | None:
    if node.op == "RotaryEmbedding":
        name = node.input(2 if node.domain else 1)
    elif node.op == "Gather" and node.attribute("axis", 0) == 0 and _is_position(graph, node.input(1)):
        name = node.input(0)
    else:
        name = node.input(_TABLES[node.op]) if node.op in _TABLES else ""
    tensor = graph.tensors.get(name)
    return tensor.shape[0] if tensor is not None and len(tensor.shape) == 2 else None


def _is_position(graph: EditableGraph, name: str) -> bool:
    while (node := graph.producer_of(name, "Cast", "Reshape", "Squeeze", "Unsqueeze")) is not None:
        name = node.input(0)
    return name == POSITIONS
