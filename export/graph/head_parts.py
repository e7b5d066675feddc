"""Draft heads over the states of a target, EAGLE-3 and multi-token prediction: their weights and their graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from ...models.manifest import HeadKind
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import FusedLinear, Layer, Norm, QuantPlan
from ..checkpoint.layout import final_norm
from ..checkpoint.safetensors_files import Checkpoint
from ..checkpoint.source import Float32Array
from . import inputs_outputs
from .decoder import append_second_half, as_model
from .decoder_parts import HEAD_INPUT, Attention, append_embedding, append_product, embedded_value
from .initializers import Initializers
from .inputs_outputs import DraftFeatures
from .nodes import Nodes


@dataclass(frozen=True)
class FeatureHead:
    """One decoder layer that reads the embedding of a token and a state of the token before it.

    An EAGLE-3 head projects three states of the target to the first of these states; its layer's attention reads both
    side by side, and its output is the next state. A multi-token-prediction module takes the model's states after its
    last norm, projects the pair to the layer's input, and has a last norm of its own, after which the next state is.
    """

    kind: HeadKind
    checkpoint: Checkpoint
    """The tensors of the layer and of its last norm are named like those of a decoder of one layer."""
    config: DecoderConfig
    """The layer, with the vocabulary of the embedding."""
    features: DraftFeatures
    """What the head reads of the target."""
    feature_size: int
    """Number of features of a token."""
    projection: FusedLinear
    layer: Layer
    norms: tuple[Norm, Norm]
    """The norms of the embedding and of the state."""
    embedding: FusedLinear | None = None
    """The head's own embedding; None for the target's. So is `lm_head`."""
    lm_head: FusedLinear | None = None
    target_ids: npt.NDArray[np.int64] | None = None
    """The target's ids of the LM head's tokens, int64 [draft vocabulary]; None if they are the same."""

    @property
    def linears(self) -> tuple[FusedLinear, ...]:
        """All linears, in the order of the graph."""
        found = (self.embedding, self.projection, *self.layer.linears, self.lm_head)
        return tuple(linear for linear in found if linear is not None)


def build_feature_head(
    head: FeatureHead,
    context: int,
    plan: QuantPlan,
    weights: Initializers,
    target: GraphProto,
    target_norm: Float32Array | None = None,
    head_factors: Float32Array | None = None,
) -> ModelProto:
    """Build the graph of a head, which has the inputs and outputs of a decoder, and states between its passes.

    Args:
        head: the head.
        context: number of positions to support.
        plan: the format of each of the head's linears.
        weights: stores the head's tensors.
        target: the graph of the target, whose embedding and LM head are shared where the head has none.
        target_norm: for a multi-token-prediction module, the weights of the target's last norm, float32 [hidden].
        head_factors: what the input of the LM head is multiplied by, float32 [hidden]; None for nothing.
    """
    nodes = Nodes(head.config, plan, weights)
    attention, embedded = Attention(nodes, context), embedded_value(target)
    before: list[NodeProto] = []
    if head.embedding is not None:
        embedded, _ = append_embedding(nodes)
    elif embedded is not None:
        before = needed_nodes(target.node, [embedded])
    else:
        raise ValueError("the graph has no embedding under a known name")
    if target_norm is None:
        names = ("input_norm", "feature_norm", "hidden")
        given = nodes.linear(head.projection, inputs_outputs.DRAFT_FEATURES)
    else:
        names = ("embedding_norm", "state_norm", "states.batch")
        factors = nodes.constant("target_norm.weight", target_norm)
        given = nodes.norm_by(inputs_outputs.DRAFT_FEATURES, factors, "target_norm")
    states = nodes.add("Concat", [given, inputs_outputs.DRAFT_STATES], "states", axis=0)
    hidden = nodes.add("Unsqueeze", [states, nodes.integers("states.axes", 0)], names[2])
    pair = [nodes.norm(*each) for each in zip((embedded, hidden), head.norms, names[:2], strict=True)]
    mixed = nodes.add("Concat", pair, "both", axis=-1)
    if target_norm is not None:
        hidden = nodes.linear(head.projection, mixed)
        assert head.layer.before_attention is not None  # noqa: S101 -- every family with such modules has the norm
        mixed = nodes.norm(hidden, head.layer.before_attention, "layers.0.input_norm")
    rows, residual = _append_layer(nodes, attention, head.layer, mixed, hidden)
    nodes.add("Identity", [residual if target_norm is None else rows], inputs_outputs.NEXT_STATES)
    after: list[NodeProto] = []
    if head.lm_head is not None:
        append_product(nodes, head.lm_head, rows, inputs_outputs.LOGITS)
    else:
        after = needed_nodes([node for node in target.node if HEAD_INPUT not in node.output], [inputs_outputs.LOGITS])
        if head_factors is None:
            nodes.add("Identity", [rows], HEAD_INPUT)
        else:
            nodes.add("Mul", [rows, nodes.constant("head_factors", head_factors)], HEAD_INPUT)
    return _head_model(head, nodes, target, before, after)


def _append_layer(nodes: Nodes, attention: Attention, layer: Layer, mixed: str, hidden: str) -> tuple[str, str]:
    """Append the decoder layer and its last norm, for the tokens with logits.

    Args:
        nodes: the graph so far.
        attention: appends the attention.
        layer: the layer.
        mixed: the inputs of attention [1, M, _].
        hidden: the residual stream [1, M, hidden].

    Returns:
        The names of the normed states and of the residual stream, each [R, hidden].
    """
    attended = attention.append(0, layer, mixed)
    # Nothing after this point mixes positions, so those without requested logits are dropped here.
    attended = nodes.add("Gather", [attended, "logit_rows"], "asked.attended", axis=1)
    residual = nodes.add("Gather", [hidden, "logit_rows"], "asked.hidden", axis=1)
    projected = nodes.linear(layer.output, attended)
    normed, residual = append_second_half(nodes, 0, layer, projected, residual, final_norm(nodes.config))
    axes = nodes.integers("rows.axes", 0)
    return nodes.add("Squeeze", [normed, axes], "rows"), nodes.add("Squeeze", [residual, axes], "rows.residual")


def _head_model(
    head: FeatureHead, nodes: Nodes, target: GraphProto, before: Sequence[NodeProto], after: Sequence[NodeProto]
) -> ModelProto:
    """The model of the head's own nodes, and of those of the target's before and after them."""
    config = head.config
    shared = {
        tensor.name: tensor
        for part in (before, after)
        for used in [{name for node in part for name in node.input}]
        for tensor in target.initializer
        if tensor.name in used
    }
    declare, float32 = helper.make_tensor_value_info, TensorProto.FLOAT
    vocabulary = config.vocab_size if head.lm_head is None else head.lm_head.shape[0]
    inputs = [
        *inputs_outputs.graph_inputs(config),
        declare(inputs_outputs.DRAFT_FEATURES, float32, ["F", head.feature_size]),
        declare(inputs_outputs.DRAFT_STATES, float32, ["S", config.hidden_size]),
    ]
    outputs = [
        declare(inputs_outputs.LOGITS, float32, ["R", vocabulary]),
        declare(inputs_outputs.NEXT_STATES, float32, ["R", config.hidden_size]),
        *inputs_outputs.graph_outputs(config, hidden_states=False)[1:],
    ]
    stored = [*nodes.weights.protos, *shared.values()]
    return as_model(helper.make_graph([*before, *nodes.all(), *after], "draft_head", inputs, outputs, stored))


def needed_nodes(nodes: Sequence[NodeProto], outputs: Iterable[str]) -> list[NodeProto]:
    """Return the nodes on which `outputs` depend; `nodes` are in topological order."""
    needed = set(outputs)
    found = []
    for node in reversed(nodes):
        if needed.intersection(node.output):
            needed.update(node.input)
            found.append(node)
    return found[::-1]
