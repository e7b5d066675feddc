"""Replaces attention in plain operators, as PyTorch's exporter writes it, by one GroupQueryAttention a layer.

The rotary embedding becomes part of the operator if it is recognized. Lengths, positions and bias are wired afterwards
(`contract_inputs`).
"""

from __future__ import annotations

from typing import Final

from .attention_pattern import Attention, find_attention
from .editable import MICROSOFT, EditableGraph
from .graph_parts import unsupported
from .plain_operators import fold_shapes, fuse_gelu, fuse_norms
from .rotary_pattern import RotaryTable, Rotation, find_rotation
from .subgraph_runner import SubgraphRunner, channels

_HEAD_MULTIPLE: Final = 8
"""GroupQueryAttention requires a number of channels per head that is a multiple of this."""
_OPEN_END: Final = 1 << 31
"""A Slice with at least this end has no end."""
_ROTARY_MULTIPLE: Final = 16
"""GroupQueryAttention rotates multiples of this many channels; other numbers are rotated before it."""


def fuse_operators(graph: EditableGraph, context: int) -> None:
    """Make shapes constants, and fuse norms, GELU and the attention of every layer with its rotary embedding.

    Args:
        graph: a decoder that computes in float32 and whose attention is written in plain operators.
        context: number of positions that the upgraded model will serve.

    Raises:
        BundleError: something in the place of attention is not recognized, or its heads have an unsupported size.
        ExportError: a part of the graph cannot be run.
    """
    fuse_gelu(graph)
    fuse_norms(graph)
    fold_shapes(graph, context)
    runner = SubgraphRunner(graph)
    layers = find_attention(runner, context)
    for attention in layers:
        if attention.head_dim % _HEAD_MULTIPLE:
            raise unsupported(
                f"the model's heads have {attention.head_dim} channels, "
                f"and fused attention requires a multiple of {_HEAD_MULTIPLE}"
            )
    tables: dict[RotaryTable, tuple[str, str]] = {}
    rotations = []
    for attention in layers:
        rotations.append(rotation := find_rotation(runner, attention, context, tables))
        if rotation is not None and (table := rotation[2]) not in tables:
            names = graph.add_tensor("rotary.cos", table.cosines), graph.add_tensor("rotary.sin", table.sines)
            tables[table] = names
    for attention, rotation in zip(layers, rotations, strict=True):
        _replace(runner, attention, rotation, tables)
    graph.sweep()


def pack_heads(graph: EditableGraph) -> None:
    """Give GroupQueryAttention the value that its query, key and value are cut from, if they fill it in this order."""
    for node in graph.nodes_of("GroupQueryAttention"):
        cuts = [cut for name in node.inputs[:3] if (cut := _cut(graph, name)) is not None]
        if len(cuts) < 3 or len({source for source, _, _ in cuts}) != 1:
            continue
        (_, start, query_end), (_, key_start, key_end), (_, value_start, value_end) = cuts
        adjacent = (start, key_start, value_start) == (0, query_end, key_end)
        # Key and value have the same width, in proportion to the query; the last cut may have no end.
        width = key_end - key_start
        in_proportion = width * node.attribute("num_heads") == query_end * node.attribute("kv_num_heads")
        if adjacent and in_proportion and (value_end >= _OPEN_END or value_end - value_start == width):
            graph.set_inputs(node, [cuts[0][0], "", "", *node.inputs[3:]])
    graph.sweep()


def _replace(
    runner: SubgraphRunner,
    attention: Attention,
    rotation: Rotation | None,
    tables: dict[RotaryTable, tuple[str, str]],
) -> None:
    graph, stem = runner.graph, f"layers.{attention.layer}"
    query, key, table = (attention.query, attention.key.new, None) if rotation is None else rotation
    values = {"query": query, "key": key, "value": attention.value.new}
    heads = [_merged_heads(runner, name, f"{stem}.{part}") for part, name in values.items()]
    inside = table is not None and 2 * table.pairs % _ROTARY_MULTIPLE == 0
    names = ("", "") if table is None else tables[table]
    if table is not None and not inside:
        for index, count in ((0, attention.heads), (1, attention.kv_heads)):
            heads[index] = graph.value(
                "RotaryEmbedding",
                [heads[index], "position_ids", *names],
                name=f"{heads[index]}.rotated",
                domain=MICROSOFT,
                num_heads=count,
                rotary_embedding_dim=2 * table.pairs,
                interleaved=int(table.interleaved),
            )
    node = graph.add(
        "GroupQueryAttention",
        [*heads, attention.key.past, attention.value.past, "", "", *(names if inside else ("", ""))],
        [f"{stem}.attended", f"{stem}.keys", f"{stem}.values"],
        domain=MICROSOFT,
        num_heads=attention.heads,
        kv_num_heads=attention.kv_heads,
        scale=attention.scale,
        softcap=attention.softcap or None,
        local_window_size=attention.window if attention.window > 0 else None,
        do_rotary=int(inside),
        rotary_interleaved=int(table.interleaved) if inside and table is not None else None,
    )
    graph.replace_uses(attention.merged, node.output(0))
    for cache, present in ((attention.key, node.output(1)), (attention.value, node.output(2))):
        # Only the graph output changes: a Shape of the old value still reads that.
        graph.set_output(graph.outputs[cache.present], present)


def _merged_heads(runner: SubgraphRunner, name: str, stem: str) -> str:
    """Heads [1, heads, new, head_dim] or [1, new, heads, head_dim] as [1, new, heads * head_dim].

    If they were split from such a value, that is returned.
    """
    graph = runner.graph
    while (before := _before_split(runner, name)) is not None:
        name = before
    shape = runner.shape(name) or ()
    if len(shape) == 3:
        return name
    if shape[1] != "new" and shape[1] != 1:
        name = graph.value("Transpose", [name], name=f"{stem}.rows", perm=[0, 2, 1, 3])
    return graph.value("Reshape", [name, [1, -1, channels(shape)]], name=stem)


def _before_split(runner: SubgraphRunner, name: str) -> str | None:
    """The value before one step of splitting it into heads; None if that step is something else."""
    node = runner.graph.producer_of(name, "Reshape", "Transpose", "Unsqueeze")
    shape = runner.shape(name)
    if node is None or shape is None or len(shape) != 4:
        return None
    if node.op == "Transpose":
        return node.input(0) if node.attribute("perm") == [0, 2, 1, 3] else None
    return node.input(0) if runner.shape(node.input(0)) == (1, "new", channels(shape)) else None


def _cut(graph: EditableGraph, name: str) -> tuple[str, int, int] | None:
    """The value that another is cut from along the last of three axes, and the bounds of the cut."""
    node = graph.producer_of(name, "Slice", "Split")
    if node is None:
        return None
    if node.op == "Split":
        widths = graph.integers(node.input(1)) if node.input(1) else node.attribute("split")
        if node.attribute("axis", 0) not in (-1, 2) or not widths:
            return None
        start = sum(widths[: node.outputs.index(name)])
        return node.input(0), start, start + widths[node.outputs.index(name)]
    given = (graph.integers(node.input(index)) if node.input(index) else [1] for index in range(1, 5))
    start, stop, axes, steps = given
    if start is None or stop is None or axes not in ([-1], [2]) or steps != [1] or start[0] < 0:
        return None
    return node.input(0), start[0], stop[0]
