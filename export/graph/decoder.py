"""The decoder as one ONNX graph for prefill, decoding and tree verification.

The inputs and outputs are the graph contract (`contract`). This module strings the layers together; what they are made
of is in `vocabulary`, `attention` and `feed_forward`. Linears of fewer than 32 bits are MatMulNBits at accuracy level 4
(8-bit activations), the level at which every bit width has a fast kernel on CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from onnx import GraphProto, ModelProto, helper

from ...models.manifest import WeightFormat
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layout import Norm, final_norm, layer_layout
from . import inputs_outputs
from .attention import Attention
from .embedding_head import EmbeddingAndHead
from .feed_forward import append_feed_forward
from .initializers import Initializers
from .nodes import MICROSOFT, Nodes

OPSET: Final = 21
IR_VERSION: Final = 10


def build_graph(
    config: DecoderConfig, context: int, plan: Mapping[str, WeightFormat], weights: Initializers
) -> ModelProto:
    """Build the graph and stream its weights out.

    Args:
        config: the model's numbers.
        context: positions in the rotary table.
        plan: weight format by unit (see `Manifest.weights`).
        weights: makes and stores the initializers.

    Returns:
        The model; its large initializers refer to the external data file.

    Raises:
        CheckpointError: a tensor cannot be read.
        OSError: the disk refused a write.
    """
    nodes = Nodes(config, plan, weights)
    _append_decoder(nodes, context)
    graph = GraphProto(
        name="decoder",
        node=nodes.protos,
        initializer=weights.protos,
        input=inputs_outputs.inputs(config),
        output=inputs_outputs.outputs(config),
    )
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)],
        ir_version=IR_VERSION,
        producer_name="edge-run",
    )


def _append_decoder(nodes: Nodes, context: int) -> None:
    config, attention, vocabulary = nodes.config, Attention(nodes, context), EmbeddingAndHead(nodes)
    residual = vocabulary.append_embedding()
    layers = [layer_layout(config, index) for index in range(config.layers)]
    first = layers[0].before_attention
    normed = residual if first is None else nodes.norm(residual, first, "layers.0.input_norm")
    for index, layer in enumerate(layers):
        name, last = f"layers.{index}", index == config.layers - 1
        attended = attention.append(index, layer, normed)
        if last:
            # Nothing below mixes rows, so rows whose logits nobody asked for stop here.
            attended = nodes.add("Gather", [attended, "logit_rows"], "asked.attended", axis=1)
            residual = nodes.add("Gather", [residual, "logit_rows"], "asked.residual", axis=1)
        projected = nodes.linear(layer.output, attended)
        normed, residual = _join(
            nodes, projected, residual, layer.after_attention, layer.before_mlp, f"{name}.mlp_norm"
        )
        fed = append_feed_forward(nodes, index, layer, normed)
        following = final_norm(config) if last else layers[index + 1].before_attention
        normed, residual = _join(nodes, fed, residual, layer.after_mlp, following, f"{name}.next_norm")
    vocabulary.append_head(normed)


def _join(
    nodes: Nodes, value: str, residual: str, after: Norm | None, before: Norm | None, name: str
) -> tuple[str, str]:
    """Add a part's output to the residual: what the next part reads, and the new residual."""
    if after is not None:
        value = nodes.norm(value, after, f"{name}.after")
    value = nodes.scaled(value, nodes.config.residual_scale, "residual.scale", f"{name}.scaled")
    if before is not None:
        return nodes.add_and_norm(value, residual, before, name)
    total = nodes.add("Add", [value, residual], f"{name}.residual")
    return total, total
