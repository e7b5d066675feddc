"""Attention in plain operators becomes one GroupQueryAttention a layer, with the rotation inside where it is known.

What the operator reads besides heads and cache (lengths, positions, bias) is wired afterwards (`fused`).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ....errors import BundleError
from ..edit.editable import MICROSOFT, EditableGraph
from .attention_pattern import Attention, CachedRows, find_attention
from .rotary_pattern import RotaryTable, Rotation, find_rotation
from .subgraph_probe import Probe

_CHANNELS: Final = 8
"""GroupQueryAttention takes heads of multiples of this many channels."""
_ROTATED_CHANNELS: Final = 16
"""GroupQueryAttention rotates multiples of this many channels; others are rotated in front of it."""


def fuse_attention(graph: EditableGraph, context: int) -> None:
    """Replace every layer's attention.

    Args:
        graph: a decoder whose attention is written in plain operators.
        context: positions that the upgraded model will serve.

    Raises:
        BundleError: something in the place of attention is not recognised, or has heads of odd sizes.
    """
    probe = Probe(graph)
    layers = find_attention(probe, context)
    for attention in layers:
        if attention.head_dim % _CHANNELS:
            raise BundleError(
                f"the model's heads have {attention.head_dim} channels, "
                f"and fused attention takes multiples of {_CHANNELS}",
                "run it as it is",
            )
    tables: list[RotaryTable] = []
    rotations: list[Rotation | None] = []
    for attention in layers:
        rotation = find_rotation(probe, attention, context, tables)
        rotations.append(rotation)
        if rotation is not None and rotation.table not in tables:
            tables.append(rotation.table)
    named = {table: _table_names(graph, table) for table in tables}
    for attention, rotation in zip(layers, rotations, strict=True):
        _replace(graph, probe, attention, rotation, named)
    graph.sweep()


def _table_names(graph: EditableGraph, table: RotaryTable) -> tuple[str, str]:
    return graph.add_tensor("rotary.cos", table.cosines), graph.add_tensor("rotary.sin", table.sines)


def _replace(
    graph: EditableGraph,
    probe: Probe,
    attention: Attention,
    rotation: Rotation | None,
    tables: dict[RotaryTable, tuple[str, str]],
) -> None:
    stem = f"layers.{attention.layer}"
    query, key = (attention.query, attention.key.new) if rotation is None else (rotation.query, rotation.key)
    heads = [
        _joined(graph, probe, query, f"{stem}.query"),
        _joined(graph, probe, key, f"{stem}.key"),
        _joined(graph, probe, attention.value.new, f"{stem}.value"),
    ]
    cosines, sines = "", ""
    inside = False
    if rotation is not None:
        cosines, sines = tables[rotation.table]
        inside = 2 * rotation.table.pairs % _ROTATED_CHANNELS == 0
        if not inside:
            for index, count in ((0, attention.heads), (1, attention.kv_heads)):
                heads[index] = _rotated(graph, heads[index], count, rotation.table, (cosines, sines))
            cosines, sines = "", ""
    node = graph.add(
        "GroupQueryAttention",
        [*heads, attention.key.past, attention.value.past, "", "", cosines, sines],
        [f"{stem}.attended", f"{stem}.keys", f"{stem}.values"],
        domain=MICROSOFT,
        num_heads=attention.heads,
        kv_num_heads=attention.kv_heads,
        scale=attention.scale,
        softcap=attention.softcap or None,
        local_window_size=attention.window if attention.window > 0 else None,
        do_rotary=int(inside),
        rotary_interleaved=int(rotation.table.interleaved) if inside and rotation is not None else None,
    )
    graph.replace_uses(attention.merged, node.output(0))
    _hand_over(graph, attention.key, node.output(1))
    _hand_over(graph, attention.value, node.output(2))


def _hand_over(graph: EditableGraph, rows: CachedRows, present: str) -> None:
    """Let the cache output be what the operator writes. What asked the old one for its shape goes on asking it."""
    graph.set_output(graph.outputs[rows.present], present)


def _joined(graph: EditableGraph, probe: Probe, name: str, stem: str) -> str:
    """Heads [1, heads, rows, head_dim], or with rows first, as [1, rows, heads * head_dim]; where they were that before
    they were taken apart, it is that value."""
    while (before := _before_parting(graph, probe, name)) is not None:
        name = before
    extents = probe.extents(name) or ()
    if len(extents) == 3:
        return name
    if extents[1] != "rows" and extents[1] != 1:
        name = graph.add("Transpose", [name], name=f"{stem}.rows", perm=[0, 2, 1, 3]).output(0)
    shape = graph.add_tensor("heads.joined", np.array([1, -1, _channels(extents)], np.int64))
    return graph.add("Reshape", [name, shape], name=stem).output(0)


def _before_parting(graph: EditableGraph, probe: Probe, name: str) -> str | None:
    """What heads were before one step of laying them out; None if the step was another."""
    node = graph.producer_of(name, "Reshape", "Transpose", "Unsqueeze")
    extents = probe.extents(name)
    if node is None or extents is None or len(extents) != 4:
        return None
    if node.op == "Transpose":
        return node.input(0) if node.attribute("perm") == [0, 2, 1, 3] else None
    return node.input(0) if probe.extents(node.input(0)) == (1, "rows", _channels(extents)) else None


def _channels(extents: tuple[object, ...]) -> int:
    """Channels of all heads together."""
    return int(np.prod([each for each in extents if isinstance(each, int)]))


def _rotated(graph: EditableGraph, heads: str, count: int, table: RotaryTable, names: tuple[str, str]) -> str:
    node = graph.add(
        "RotaryEmbedding",
        [heads, "position_ids", *names],
        name=f"{heads}.rotated",
        domain=MICROSOFT,
        num_heads=count,
        rotary_embedding_dim=2 * table.pairs,
        interleaved=int(table.interleaved),
    )
    return node.output(0)
