"""A multi-token-prediction module as an ONNX graph over the target's features and its own states."""

from __future__ import annotations

from dataclasses import dataclass

from onnx import GraphProto, ModelProto

from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import FusedLinear, Layer, Norm, QuantPlan
from ..checkpoint.source import Float32Array
from . import inputs_outputs
from .attention import Attention
from .embedding_head import HEAD_INPUT
from .head_parts import append_head_layer, embedding_of, head_model, lm_head_of
from .initializers import Initializers
from .nodes import Nodes


@dataclass(frozen=True)
class MtpParts:
    """The parts of a module, by the names of their tensors."""

    config: DecoderConfig
    projection: FusedLinear
    layer: Layer
    embedding_norm: Norm
    state_norm: Norm


def build_mtp_module(
    parts: MtpParts,
    context: int,
    plan: QuantPlan,
    weights: Initializers,
    target: GraphProto,
    target_norm: Float32Array,
    head_factors: Float32Array | None,
) -> ModelProto:
    """Build the graph of a module and write its weights to the external data file.

    Args:
        parts: the module.
        context: number of positions in the rotary table.
        plan: the quantization plan of the module.
        weights: creates and stores the initializers.
        target: the target's graph, whose embedding and LM head the module reads.
        target_norm: factors of the target's last norm, float32 [hidden].
        head_factors: what the inputs of the target's LM head were multiplied by, float32 [hidden]; None for nothing.

    Raises:
        CheckpointError: a tensor cannot be read.
        OSError: the disk refused a write.
    """
    nodes = Nodes(parts.config, plan, weights)
    attention = Attention(nodes, context)
    embedding, lm_head = embedding_of(target), lm_head_of(target)
    # The target's states are taken before its last norm, whose weights calibration may have changed.
    factors = nodes.vector_constant("target_norm.weight", target_norm)
    normed = nodes.norm_by(inputs_outputs.DRAFT_FEATURES, factors, "target_norm")
    states = nodes.add("Concat", [normed, inputs_outputs.DRAFT_STATES], "states", axis=0)
    states = nodes.add("Unsqueeze", [states, nodes.integers("states.axes", 0)], "states.batch")
    both = [
        nodes.norm(embedding.value, parts.embedding_norm, "embedding_norm"),
        nodes.norm(states, parts.state_norm, "state_norm"),
    ]
    hidden = nodes.linear(parts.projection, nodes.add("Concat", both, "both", axis=-1))
    before = parts.layer.before_attention
    assert before is not None  # noqa: S101 -- every family with such modules has the norm
    mixed = nodes.norm(hidden, before, "layers.0.input_norm")
    rows, _ = append_head_layer(nodes, attention, parts.layer, mixed, hidden)
    nodes.add("Identity", [rows], inputs_outputs.NEXT_STATES)
    if head_factors is None:
        nodes.add("Identity", [rows], HEAD_INPUT)
    else:
        nodes.add("Mul", [rows, nodes.vector_constant("head_factors", head_factors)], HEAD_INPUT)
    return head_model(nodes, parts.config.hidden_size, parts.config.vocab_size, embedding, lm_head)
