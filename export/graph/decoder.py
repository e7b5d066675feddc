"""The decoder as one ONNX graph for prefill, decode and tree verification.

`inputs_outputs` defines the graph's inputs and outputs. This module connects the parts in `decoder_parts`. Quantized
linears are MatMulNBits at accuracy level 4 (8-bit activations), at which every bit width has a fast CPU kernel.
"""

from __future__ import annotations

import math
from typing import Final

from onnx import GraphProto, ModelProto, helper

from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import Layer, LayerInput, Norm, PerLayerInputsLayout, QuantPlan
from ..checkpoint.layout import final_norm, layer_layout, per_layer_inputs_layout
from . import inputs_outputs
from .decoder_parts import Attention, activated, append_embedding, append_feed_forward, append_head, gathered_rows
from .initializers import Initializers
from .inputs_outputs import DraftFeatures
from .linear_attention import append_states
from .nodes import MICROSOFT, Nodes

OPSET: Final = 21
IR_VERSION: Final = 10
_NAME: Final = "layer_inputs"


def build_graph(
    config: DecoderConfig,
    context: int,
    plan: QuantPlan,
    weights: Initializers,
    hidden_states: bool = False,
    features: DraftFeatures | None = None,
) -> ModelProto:
    """Build the graph and write its weights to the external data file.

    Args:
        config: the architecture.
        context: number of positions in the rotary table.
        plan: the quantization plan.
        weights: creates and stores the initializers.
        hidden_states: whether the states before the LM head are an output too.
        features: the hidden states that are an output for a draft head; None for none.

    Returns:
        The model, whose large initializers refer to the external data file.

    Raises:
        CheckpointError: a tensor cannot be read.
        OSError: the disk refused a write.
    """
    nodes = Nodes(config, plan, weights)
    head_input = _append_decoder(nodes, context, features)
    if hidden_states:
        nodes.add("Identity", [head_input], inputs_outputs.HIDDEN_STATES)
    inputs = inputs_outputs.graph_inputs(config)
    outputs = inputs_outputs.graph_outputs(config, hidden_states, features)
    return as_model(helper.make_graph(nodes.all(), "decoder", inputs, outputs, weights.protos))


def as_model(graph: GraphProto) -> ModelProto:
    """The model of a graph, for the operator sets that the exporter uses."""
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)],
        ir_version=IR_VERSION,
        producer_name="edge-run",
    )


def _append_decoder(nodes: Nodes, context: int, features: DraftFeatures | None) -> str:
    """Append everything between the graph's inputs and its logits; returns the name of the head's input [R, hidden]."""
    config, attention = nodes.config, Attention(nodes, context)
    residual, embedding = append_embedding(nodes)
    inputs = per_layer_inputs_layout(config)
    own_inputs = [] if inputs is None else append_per_layer_inputs(nodes, inputs, residual)
    layers = [layer_layout(config, index) for index in range(config.layers)]
    first = layers[0].before_attention
    normed = residual if first is None else nodes.norm(residual, first, "layers.0.input_norm")
    whole = features is not None and features.needs_last_layer(config)
    entering: dict[int, str] = {}
    for index, layer in enumerate(layers):
        entering[index] = residual
        name, last = f"layers.{index}", index == config.layers - 1
        if layer.states is not None:
            attended = append_states(nodes, index, layer, layer.states, normed)
        else:
            attended = attention.append(index, layer, normed)
        if last and not whole:
            # Nothing after this point mixes positions, so those without requested logits are dropped here.
            attended = nodes.add("Gather", [attended, "logit_rows"], "asked.attended", axis=1)
            residual = nodes.add("Gather", [residual, "logit_rows"], "asked.residual", axis=1)
            own_inputs = [nodes.add("Gather", [each, "logit_rows"], "asked.input", axis=1) for each in own_inputs[-1:]]
        projected = nodes.linear(layer.output, attended)
        next_norm = final_norm(config) if last else layers[index + 1].before_attention
        if layer.own_input is None and layer.scale is None:
            normed, residual = append_second_half(nodes, index, layer, projected, residual, next_norm)
            continue
        _, residual = append_second_half(nodes, index, layer, projected, residual, None, "mlp_sum")
        if layer.own_input is not None:
            residual = append_own_input(nodes, name, layer.own_input, residual, own_inputs[-1 if last else index])
        if layer.scale is not None:
            factor = nodes.weights.vector(f"{name}.scale", [layer.scale])
            residual = nodes.add("Mul", [residual, factor], f"{name}.scaled")
        normed = residual if next_norm is None else nodes.norm(residual, next_norm, f"{name}.next_norm")
    entering[config.layers] = residual
    if features is not None:
        states = [entering[each] for each in features.layers] or [normed]  # [1, M, hidden] each, side by side
        joined = states[0] if len(states) == 1 else nodes.add("Concat", states, "features.joined", axis=-1)
        nodes.add("Squeeze", [joined, nodes.integers("features.axes", 0)], inputs_outputs.DRAFT_FEATURES)
    if whole:
        normed = nodes.add("Gather", [normed, "logit_rows"], "asked.normed", axis=1)
    return append_head(nodes, normed, embedding)


def append_second_half(
    nodes: Nodes,
    index: int,
    layer: Layer,
    projected: str,
    residual: str,
    next_norm: Norm | None,
    part: str = "next_norm",
) -> tuple[str, str]:
    """Append what follows the output projection of attention in layer `index`.

    Args:
        nodes: the graph.
        index: number of the layer.
        layer: its weights.
        projected: name of the output of attention.
        residual: name of the residual before it.
        next_norm: the norm before the next layer; None to leave it out.
        part: last part of the names of what is appended at the end.

    Returns:
        The normed input of the next layer, and the new residual.
    """
    name = f"layers.{index}"
    normed, residual = _add_to_residual(
        nodes, projected, residual, layer.after_attention, layer.before_mlp, f"{name}.mlp_norm"
    )
    output = append_feed_forward(nodes, index, layer, normed)
    return _add_to_residual(nodes, output, residual, layer.after_mlp, next_norm, f"{name}.{part}")


def _add_to_residual(
    nodes: Nodes, value: str, residual: str, after: Norm | None, before: Norm | None, name: str
) -> tuple[str, str]:
    """Add the output of attention or feed-forward to the residual.

    Returns:
        The normed input of the next part, and the new residual.
    """
    if after is not None:
        value = nodes.norm(value, after, f"{name}.after")
    value = nodes.scaled(value, nodes.config.residual_scale, "residual.scale", f"{name}.scaled")
    if before is not None:
        return nodes.add_and_norm(value, residual, before, name)
    sum_ = nodes.add("Add", [value, residual], f"{name}.residual")
    return sum_, sum_


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
    rows, _ = gathered_rows(nodes, layout.table, f"{_NAME}.own")
    own = nodes.scaled(rows, math.sqrt(config.per_layer_width), f"{_NAME}.table.scale", f"{_NAME}.own.scaled")
    total = nodes.add("Add", [together, own], f"{_NAME}.sum")
    halved = nodes.scaled(total, math.sqrt(0.5), f"{_NAME}.scale", _NAME)
    names = [f"{_NAME}.{layer}" for layer in range(config.layers)]
    return nodes.split(halved, names, nodes.integers(f"{_NAME}.widths", *[config.per_layer_width] * config.layers))


def append_own_input(nodes: Nodes, name: str, layer: LayerInput, residual: str, own: str) -> str:
    """Append residual + norm(output(activation(gate(residual)) * own)) of a layer; returns the name of the sum."""
    prefix = f"{name}.input"
    gate = activated(nodes, prefix, nodes.linear(layer.gate, residual))
    read = nodes.linear(layer.output, nodes.add("Mul", [gate, own], f"{prefix}.gated"))
    normed = nodes.norm(read, layer.after, f"{prefix}.after")
    return nodes.add("Add", [residual, normed], f"{prefix}.residual")
