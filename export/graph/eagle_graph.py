"""An EAGLE-3 head as an ONNX graph over the target's features and its own states (Li et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass

from onnx import GraphProto, ModelProto

from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import FusedLinear, Layer, Norm, QuantPlan
from . import inputs_outputs
from .attention import Attention
from .embedding_head import EmbeddingAndHead
from .head_parts import append_head_layer, embedding_of, head_model
from .initializers import Initializers
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
    rows, residual = append_head_layer(nodes, attention, parts.layer, both, hidden)
    nodes.add("Identity", [residual], inputs_outputs.NEXT_STATES)
    _append_lm_head(nodes, parts.lm_head, rows)
    return head_model(nodes, parts.projection.columns, parts.lm_head.shape[0], shared)


def _append_lm_head(nodes: Nodes, lm_head: FusedLinear, rows: str) -> None:
    weight_format = nodes.plan[lm_head.name]
    if weight_format.bits == 32:
        nodes.add("Gemm", [rows, nodes.weights.float32(lm_head)], inputs_outputs.LOGITS, transB=1)
        return
    stored = nodes.weights.quantized(lm_head, weight_format)
    nodes.matmul_nbits(lm_head.shape, weight_format, [rows, *stored.inputs()], inputs_outputs.LOGITS)
