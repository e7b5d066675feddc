"""The inputs in the graph that layers have of their own beside the hidden states (`architectures.per_layer_inputs`)."""

from __future__ import annotations

import math
from typing import Final

from ..checkpoint.layer_weights import LayerInput, PerLayerInputsLayout
from .embedding_head import gathered_rows
from .feed_forward import activated
from .nodes import Nodes

_NAME: Final = "layer_inputs"


def append_per_layer_inputs(nodes: Nodes, layout: PerLayerInputsLayout, embedded: str) -> list[str]:
    """Append the inputs of all layers, (norm(projection(embedded) / sqrt(hidden)) + table row * sqrt(width)) / sqrt(2).

    Args:
        nodes: the graph.
        layout: the linears.
        embedded: name of the scaled token embeddings, [1, M, hidden].

    Returns:
        The name of [1, M, width] for each layer.
    """
    config = nodes.config
    projected = nodes.scaled(
        nodes.linear(layout.projection, embedded),
        1 / math.sqrt(config.hidden_size),
        f"{_NAME}.projection.scale",
        f"{_NAME}.projected",
    )
    apart = nodes.integers(f"{_NAME}.apart", 0, 0, config.layers, config.per_layer_width)
    normed = nodes.norm(nodes.add("Reshape", [projected, apart], f"{_NAME}.by_layer"), layout.norm, f"{_NAME}.normed")
    together = nodes.add("Reshape", [normed, nodes.integers(f"{_NAME}.together", 0, 0, -1)], f"{_NAME}.joined")
    own = nodes.scaled(
        _rows(nodes, layout), math.sqrt(config.per_layer_width), f"{_NAME}.table.scale", f"{_NAME}.own.scaled"
    )
    total = nodes.add("Add", [together, own], f"{_NAME}.sum")
    halved = nodes.scaled(total, math.sqrt(0.5), f"{_NAME}.scale", _NAME)
    names = [f"{_NAME}.{layer}" for layer in range(config.layers)]
    return nodes.split(halved, names, nodes.integers(f"{_NAME}.widths", *[config.per_layer_width] * config.layers))


def _rows(nodes: Nodes, layout: PerLayerInputsLayout) -> str:
    if nodes.plan[layout.table.name].bits == 32:
        return nodes.add("Gather", [nodes.weights.float32(layout.table), "input_ids"], f"{_NAME}.own", axis=0)
    return gathered_rows(nodes, layout.table, f"{_NAME}.own")[0]


def append_own_input(nodes: Nodes, name: str, layer: LayerInput, residual: str, own: str) -> str:
    """Append residual + norm(output(activation(gate(residual)) * own)) of a layer; returns the name of the sum."""
    prefix = f"{name}.input"
    gate = activated(nodes, prefix, nodes.linear(layer.gate, residual))
    read = nodes.linear(layer.output, nodes.add("Mul", [gate, own], f"{prefix}.gated"))
    normed = nodes.norm(read, layer.after, f"{prefix}.after")
    return nodes.add("Add", [residual, normed], f"{prefix}.residual")
