"""Finds the rotary tables with which a graph rotates the keys that it caches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ...errors import EdgeError
from ...models.onnx_file.graph_editor import CannotRewriteError, GraphEditor, attributes_of
from ...models.onnx_file.model_messages import Message
from ..kv.key_rotation import KeyRotation

_ATTENTION: Final = "GroupQueryAttention"
_KEY, _PAST_KEY, _COSINES, _SINES = 1, 3, 7, 8
"""Indices of the operator's inputs."""
_MAX_GRAPH_BYTES: Final = 256 << 20
"""Largest file that is read for its tables: one with its weights inside is not worth the memory."""


def key_rotations(graph: Path) -> Mapping[str, KeyRotation]:
    """The rotation of every key cache of which the graph has tables, by the name of the cache input.

    Args:
        graph: the model's file; tables in other files are mapped.

    Returns:
        Nothing for a graph that cannot be read, or that rotates without tables.
    """
    try:
        if graph.stat().st_size <= _MAX_GRAPH_BYTES:
            return _rotations(GraphEditor(graph))
    except (CannotRewriteError, EdgeError, OSError, ValueError):
        pass
    return {}


def _rotations(editor: GraphEditor) -> Mapping[str, KeyRotation]:
    """The rotations of a graph's keys, inside the attention operators or in front of them, by the name of the cache."""
    found: dict[str, KeyRotation] = {}
    for node in editor.graph.node:
        if node.op_type != _ATTENTION:
            continue
        attributes = attributes_of(node)
        if attributes.get("do_rotary"):
            tables, interleaved = node.input[_COSINES : _SINES + 1], attributes.get("rotary_interleaved")
        else:
            rotary = _rotary_before(editor, node.input[_KEY])
            if rotary is None:
                continue
            # ONNX's own operator has the tables before the positions.
            tables = rotary.input[2:4] if rotary.domain else rotary.input[1:3]
            interleaved = attributes_of(rotary).get("interleaved")
        cosines, sines = (editor.array(name) for name in tables)
        if cosines is not None and sines is not None:
            found[node.input[_PAST_KEY]] = KeyRotation(cosines, sines, bool(interleaved))
    return found


def _rotary_before(editor: GraphEditor, name: str) -> Message | None:
    """The node that rotates a value; None if it is not one."""
    while (producer := editor.producer(name)) is not None:
        if producer.op_type == "RotaryEmbedding":
            return producer
        if producer.op_type not in ("Reshape", "Transpose"):
            return None
        name = producer.input[0]
    return None
