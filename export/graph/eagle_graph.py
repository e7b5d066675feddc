"""An EAGLE-3 head as an ONNX graph over the target's features and its own states (Li et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from ..checkpoint.config import DecoderConfig
from ..checkpoint.layout import FusedLinear, Layer, Norm, QuantPlan, final_norm
from . import inputs_outputs
from .attention import Attention
from .decoder import as_model
from .embedding_head import EmbeddingAndHead, embedded_value
from .feed_forward import append_feed_forward
from .initializers import Initializers
from .needed_nodes import needed_nodes
from .nodes import Nodes


@dataclass(frozen=True)
class EagleParts:
    """The parts of a head, by the names of their tensors."""

    config: DecoderConfig
    projection: FusedLinear
    layer: Layer
    feature_norm: Norm
    lm_head: FusedLinear


def build_eagle_head(
    parts: EagleParts, context: int, plan: QuantPlan, weights: Initializers, target: GraphProto | None
) -> ModelProto:
    """Build the graph of a head and write its weights to the external data file.

    Args:
        parts: the head.
        context: number of positions in the rotary table.
        plan: the quantization plan of the head.
        weights: creates and stores the initializers.
        target: the target's graph, whose embedding the head reads; None if the head has its own.

    Raises:
        CheckpointError: a tensor cannot be read.
        OSError: the disk refused a write.
    """
    config = parts.config
    nodes = Nodes(config, plan, weights)
    attention = Attention(nodes, context)
    shared = None if target is None else embedding_of(target)
    embedded = EmbeddingAndHead(nodes).append_embedding() if shared is None else shared.value
    projected = nodes.linear(parts.projection, inputs_outputs.DRAFT_FEATURES)
    states = nodes.add("Concat", [projected, inputs_outputs.DRAFT_STATES], "states", axis=0)
    hidden = nodes.add("Unsqueeze", [states, nodes.integers("states.axes", 0)], "hidden")
    before = parts.layer.before_attention
    assert before is not None  # noqa: S101 -- every layer of this family has the norm
    normed = [nodes.norm(embedded, before, "input_norm"), nodes.norm(hidden, parts.feature_norm, "feature_norm")]
    both = nodes.add("Concat", normed, "both", axis=-1)
    attended = attention.append(0, parts.layer, both)
    # Nothing after this point mixes positions, so those without requested logits are dropped here.
    attended = nodes.add("Gather", [attended, "logit_rows"], "asked.attended", axis=1)
    residual = nodes.add("Gather", [hidden, "logit_rows"], "asked.hidden", axis=1)
    after = parts.layer.before_mlp
    assert after is not None  # noqa: S101 -- as above
    output = nodes.linear(parts.layer.output, attended)
    normed_output, residual = nodes.add_and_norm(output, residual, after, "layers.0.mlp_norm")
    mixed = append_feed_forward(nodes, 0, parts.layer, normed_output)
    last, residual = nodes.add_and_norm(mixed, residual, final_norm(config), "layers.0.next_norm")
    nodes.add("Squeeze", [residual, nodes.integers("rows.axes", 0)], inputs_outputs.NEXT_STATES)
    rows = nodes.add("Squeeze", [last, nodes.integers("rows.axes", 0)], "rows")
    _append_lm_head(nodes, parts.lm_head, rows)
    declare, hidden_size = helper.make_tensor_value_info, config.hidden_size
    logits = declare(inputs_outputs.LOGITS, TensorProto.FLOAT, ["R", parts.lm_head.shape[0]])
    graph = GraphProto(
        name="draft_head",
        node=[*weights.conversions, *(shared.nodes if shared is not None else ()), *nodes.protos],
        initializer=[*weights.protos, *(shared.initializers if shared is not None else ())],
        input=[
            *inputs_outputs.graph_inputs(config),
            declare(inputs_outputs.DRAFT_FEATURES, TensorProto.FLOAT, ["F", parts.projection.columns]),
            declare(inputs_outputs.DRAFT_STATES, TensorProto.FLOAT, ["S", hidden_size]),
        ],
        output=[
            logits,
            declare(inputs_outputs.NEXT_STATES, TensorProto.FLOAT, ["R", hidden_size]),
            *inputs_outputs.graph_outputs(config, hidden_states=False)[1:],
        ],
    )
    return as_model(graph)


def _append_lm_head(nodes: Nodes, lm_head: FusedLinear, rows: str) -> None:
    weight_format = nodes.plan[lm_head.name]
    if weight_format.bits == 32:
        nodes.add("Gemm", [rows, nodes.weights.float32(lm_head)], inputs_outputs.LOGITS, transB=1)
        return
    stored = nodes.weights.quantized(lm_head, weight_format)
    nodes.matmul_nbits(lm_head.shape, weight_format, [rows, *stored.inputs()], inputs_outputs.LOGITS)


@dataclass(frozen=True)
class SharedEmbedding:
    """The part of a target's graph that embeds its tokens."""

    value: str
    """Name of the embeddings [1, M, hidden]."""
    nodes: Sequence[NodeProto]
    initializers: Sequence[TensorProto]
    """They name the target's data file."""


def embedding_of(target: GraphProto) -> SharedEmbedding:
    """The embedding of an exported graph, without the factor that some families apply to it."""
    value = embedded_value(target)
    if value is None:
        raise ValueError("the graph has no embedding under a known name")
    nodes = needed_nodes(list(target.node), [value])
    used = {name for node in nodes for name in node.input}
    return SharedEmbedding(value, nodes, [each for each in target.initializer if each.name in used])
