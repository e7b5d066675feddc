"""What graphs of draft heads have in common: parts of their target's graph, the decoder layer, inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from ..checkpoint.layer_weights import Layer
from ..checkpoint.layout import final_norm
from . import inputs_outputs
from .attention import Attention
from .decoder import as_model
from .embedding_head import HEAD_INPUT, embedded_value
from .feed_forward import append_feed_forward
from .nodes import Nodes


class SharedPart(NamedTuple):
    """A part of a target's graph."""

    value: str
    """Name of what it computes."""
    nodes: Sequence[NodeProto]
    initializers: Sequence[TensorProto]
    """They name the target's data file."""


def embedding_of(target: GraphProto) -> SharedPart:
    """The embedding [1, M, hidden] of an exported graph, without the factor that some families apply to it."""
    value = embedded_value(target)
    if value is None:
        raise ValueError("the graph has no embedding under a known name")
    return _part(target, value, needed_nodes(list(target.node), [value]))


def lm_head_of(target: GraphProto) -> SharedPart:
    """The LM head of an exported graph: its logits of `HEAD_INPUT` [R, hidden]."""
    derived, found = {HEAD_INPUT}, []
    for node in target.node:
        if derived.intersection(node.input):
            derived.update(node.output)
            found.append(node)
    found = needed_nodes(found, [inputs_outputs.LOGITS])
    # Scales that are stored in float16 come from other nodes; "" stands for an input that a node does not have.
    others = {name for node in found for name in node.input} - derived - {""}
    return _part(target, inputs_outputs.LOGITS, [*needed_nodes(list(target.node), others), *found])


def _part(target: GraphProto, value: str, nodes: Sequence[NodeProto]) -> SharedPart:
    used = {name for node in nodes for name in node.input}
    return SharedPart(value, nodes, [each for each in target.initializer if each.name in used])


def append_head_layer(nodes: Nodes, attention: Attention, layer: Layer, mixed: str, hidden: str) -> tuple[str, str]:
    """Append the only decoder layer of a head and its last norm, for the tokens with logits.

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
    after = layer.before_mlp
    assert after is not None  # noqa: S101 -- every family with draft heads has the norm
    output = nodes.linear(layer.output, attended)
    normed, residual = nodes.add_and_norm(output, residual, after, "layers.0.mlp_norm")
    expanded = append_feed_forward(nodes, 0, layer, normed)
    normed, residual = nodes.add_and_norm(expanded, residual, final_norm(nodes.config), "layers.0.next_norm")
    axes = nodes.integers("rows.axes", 0)
    return nodes.add("Squeeze", [normed, axes], "rows"), nodes.add("Squeeze", [residual, axes], "rows.residual")


def head_model(
    nodes: Nodes,
    feature_size: int,
    vocab_size: int,
    embedding: SharedPart | None = None,
    lm_head: SharedPart | None = None,
) -> ModelProto:
    """The model of a head.

    Args:
        nodes: the head's own nodes, which give `NEXT_STATES`, and `LOGITS` if there is no `lm_head`.
        feature_size: number of features of a token.
        vocab_size: number of logits of a token.
        embedding: the target's embedding, if the head reads that.
        lm_head: the target's LM head, if the head's nodes give its input.
    """
    config, weights = nodes.config, nodes.weights
    shared = [part for part in (embedding, lm_head) if part is not None]
    before = () if embedding is None else embedding.nodes
    after = () if lm_head is None else lm_head.nodes
    initializers = {each.name: each for part in shared for each in part.initializers}
    declare, float32 = helper.make_tensor_value_info, TensorProto.FLOAT
    graph = GraphProto(
        name="draft_head",
        node=[*weights.conversions, *before, *nodes.protos, *after],
        initializer=[*weights.protos, *initializers.values()],
        input=[
            *inputs_outputs.graph_inputs(config),
            declare(inputs_outputs.DRAFT_FEATURES, float32, ["F", feature_size]),
            declare(inputs_outputs.DRAFT_STATES, float32, ["S", config.hidden_size]),
        ],
        output=[
            declare(inputs_outputs.LOGITS, float32, ["R", vocab_size]),
            declare(inputs_outputs.NEXT_STATES, float32, ["R", config.hidden_size]),
            *inputs_outputs.graph_outputs(config, hidden_states=False)[1:],
        ],
    )
    return as_model(graph)


def replace_content(
    graph: GraphProto, nodes: Sequence[NodeProto], inputs: Iterable[ValueInfoProto], outputs: Iterable[ValueInfoProto]
) -> None:
    """Give a graph other nodes, inputs and outputs; initializers that no node reads are dropped."""
    used = {name for node in nodes for name in node.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    graph.CopyFrom(GraphProto(name=graph.name, node=nodes, initializer=kept, input=inputs, output=outputs))


def needed_nodes(nodes: Sequence[NodeProto], outputs: Iterable[str]) -> list[NodeProto]:
    """Return the nodes on which `outputs` depend; `nodes` are in topological order."""
    needed = set(outputs)
    found = []
    for node in reversed(nodes):
        if needed.intersection(node.output):
            needed.update(node.input)
            found.append(node)
    return found[::-1]
