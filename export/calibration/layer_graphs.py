"""Graphs of half a decoder layer with its weights as inputs.

Attention and feed-forward are built by the code that builds the exported graph, but matrices and vectors become graph
inputs instead of initializers. So one graph serves all layers of a kind, and quantized weights can be fed. Experts are
computed in NumPy, each on the tokens that the router sends there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from ..architectures.state_layers import RecurrentConfig
from ..check.contract_session import ModelSession
from ..checkpoint.config import DecoderConfig, ExpertsConfig
from ..checkpoint.layer_weights import FusedLinear, Norm
from ..checkpoint.layout import layer_layout
from ..checkpoint.source import Float32Array
from ..graph import inputs_outputs
from ..graph.decoder import IR_VERSION, OPSET
from ..graph.decoder_parts import Attention, append_feed_forward, append_shared_expert
from ..graph.initializers import Initializers
from ..graph.linear_attention import append_states
from ..graph.nodes import MICROSOFT, Nodes

HIDDEN: Final = "hidden"
"""Name of the input: hidden states before the half, [B, S, hidden]."""
TEXT_STARTS: Final = "text_starts"
"""Name of the input with `Batch.text_starts`."""
SUM: Final = "sum"
"""Name of the output: hidden states after the half."""


CONCURRENT_PASSES: Final = 2
"""Number of passes that may run at the same time: two that share the cores are faster than one that has them all."""


def concurrent_session(model: ModelProto) -> ModelSession:
    """Load a model, several passes of which run at the same time."""
    return ModelSession(model, Path(), max(1, (os.cpu_count() or 1) // CONCURRENT_PASSES))


class Vector(NamedTuple):
    """A vector input: checkpoint vectors concatenated, with `plus` added to each element."""

    sources: tuple[str, ...]
    plus: float = 0.0
    tap: int | None = None
    """Which token of the kernels `[channels, 1, kernel]` of a convolution; None for sources that are vectors."""


class HalfLayer(NamedTuple):
    """A loaded graph of half a layer, and what its inputs take besides the hidden states."""

    layer: int
    """Index of the layer that it was built for."""
    session: ModelSession
    inputs: frozenset[str]
    """Names of all inputs."""
    vectors: dict[str, Vector]
    """Norms and biases, by the name of the input; the sources are tensors of that layer."""
    matrices: dict[str, FusedLinear]
    """Linears, by the name of the input that takes their matrix [N, K]."""
    captured: dict[str, str]
    """Name of the value [B, S, K] that a linear multiplies, an output or `HIDDEN`, by the linear's name."""
    graph: GraphProto

    def own(self, name: str, index: int) -> str:
        """The name that a linear or tensor of the layer that the graph was built for has in layer `index`."""
        return name.replace(f"layers.{self.layer}.", f"layers.{index}.", 1)


class _FedWeights(Initializers):
    """Keeps small constants as initializers; vectors become graph inputs."""

    def __init__(self) -> None:
        # Nothing is read or written, so the base class is not initialized with a checkpoint and a file.
        self.protos: list[TensorProto] = []
        self.vectors: dict[str, Vector] = {}

    def constant(self, name: str, value: npt.NDArray[np.generic]) -> str:
        self.protos.append(numpy_helper.from_array(value, name))
        return name

    def vector(self, name: str, sources: Sequence[str], plus: float = 0.0) -> str:
        self.vectors[name] = Vector(tuple(sources), plus)
        return name

    def taps(self, name: str, source: str, kernel: int) -> list[str]:
        names = [f"{name}.{tap}" for tap in range(kernel)]
        self.vectors.update({each: Vector((source,), tap=tap) for tap, each in enumerate(names)})
        return names


class _FedNodes(Nodes):
    """Builds linears that multiply by matrix inputs."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        self.fed = _FedWeights()
        super().__init__(config, {}, self.fed)
        self.index = index
        self.matrices: dict[str, FusedLinear] = {}
        self.inputs_of: dict[str, str] = {}

    def linear(self, linear: FusedLinear, value: str) -> str:
        matrix = f"{linear.name}.weight"
        self.matrices[matrix] = linear
        self.inputs_of[linear.name] = value
        product = self.add("FusedMatMul", [value, matrix], f"{linear.name}.product", MICROSOFT, transB=1)
        if not linear.biased:
            return product
        return self.add("Add", [product, self.weights.vector(f"{linear.name}.bias", linear.biases)], linear.name)

    def within_text(self, value: str, back: int) -> str:
        """Multiply by the input that masks other texts: several lie side by side in a row of a batch."""
        return self.add("Mul", [value, within_text(back)], f"{value}.within")

    def forgetting_other_texts(self, decay: str) -> str:
        """Add the input that is far below zero where a text begins, so that nothing is left of the one before it."""
        return self.add("Add", [decay, TEXT_STARTS], f"{decay}.within")

    def add_residual(self, value: str, after: Norm | None) -> None:
        """Add the half's output to the residual."""
        if after is not None:
            value = self.norm(value, after, "after")
        value = self.scaled(value, self.config.residual_scale, "residual.scale", "scaled")
        self.add("Add", [HIDDEN, value], SUM)

    def finished(self, feeds: Sequence[ValueInfoProto]) -> HalfLayer:
        """The graph, whose inputs are the hidden states, `feeds`, and the weights that its nodes use."""
        vectors = [_floats(name, 1) for name in self.fed.vectors]
        inputs = [_floats(HIDDEN, 3), *feeds, *vectors, *(_floats(name, 2) for name in self.matrices)]
        captured = [value for value in dict.fromkeys(self.inputs_of.values()) if value != HIDDEN]
        graph = helper.make_graph(
            self.protos,
            "half",
            inputs,
            [_floats(name, 3) for name in (SUM, *captured)],
            self.fed.protos,
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
        names, session = frozenset(value.name for value in inputs), concurrent_session(model)
        return HalfLayer(self.index, session, names, self.fed.vectors, self.matrices, self.inputs_of, graph)


class _FreeAttention(Attention):
    """Attention with a mask given by the caller, which includes a layer's sliding window."""

    def _window_bias(self, window: int) -> str:  # noqa: ARG002 -- the bias includes it
        return "attention_bias"


def within_text(back: int) -> str:
    """Name of the input that says which tokens have one of their own text that far before them."""
    return f"within_text.{back}"


def half_layer(config: DecoderConfig, index: int, mixes: bool, context: int) -> HalfLayer:
    """Build the first half of layer `index`, which mixes tokens, or the second one.

    The first half is norm, attention, convolution or linear attention, and output projection. Besides the inputs of
    every half, its graph has either `position_ids` int64 [B, S], `attention_bias` float32 [B, 1, S, S], `seqlens_k`
    int32 [B] and `total_sequence_length` as GroupQueryAttention defines them, and empty past keys and values; or the
    states before the first token, `Batch.within_text` for every token that a kernel reaches back, and for linear
    attention `TEXT_STARTS`.

    The second half is norm and feed-forward. With experts, it is norm, router and shared expert: in place of hidden
    states the graph then returns the scores of the experts, [B, S, experts], and behind them in the last axis, where
    the layer has a shared expert, what that computes, [B, S, hidden].
    """
    nodes, layer = _FedNodes(config, index), layer_layout(config, index)
    before = layer.before_attention if mixes else layer.before_mlp
    normed = HIDDEN if before is None else nodes.norm(HIDDEN, before, "normed")
    feeds: list[ValueInfoProto] = []
    if not mixes and layer.router is None:
        nodes.add_residual(append_feed_forward(nodes, index, layer, normed), layer.after_mlp)
    elif layer.router is not None and not mixes:
        scores = nodes.linear(layer.router, normed)
        shared = [] if layer.shared is None else [append_shared_expert(nodes, index, layer.shared, normed)]
        nodes.add("Concat", [scores, *shared], SUM, axis=-1)
    elif layer.states is None:
        mixed = _FreeAttention(nodes, context).append(index, layer, normed)
        nodes.add_residual(nodes.linear(layer.output, mixed), layer.after_attention)
        used = {name for node in nodes.protos for name in node.input}
        declared = [
            helper.make_tensor_value_info("position_ids", TensorProto.INT64, [None, None]),
            _floats("attention_bias", 4),
            helper.make_tensor_value_info("seqlens_k", TensorProto.INT32, [None]),
            helper.make_tensor_value_info("total_sequence_length", TensorProto.INT32, []),
        ]
        past = [_floats(name, 4) for name in inputs_outputs.past_cache(index)]
        feeds = [*(each for each in declared if each.name in used), *past]
    else:
        mixed = append_states(nodes, index, layer, layer.states, normed)
        nodes.add_residual(nodes.linear(layer.output, mixed), layer.after_attention)
        feeds = [_floats(inputs_outputs.past_conv(index), 3)]
        if isinstance(layer.states.config, RecurrentConfig):
            feeds += [_floats(inputs_outputs.past_recurrent(index), 4), _floats(inputs_outputs.past_updates(index), 3)]
            feeds.append(_floats(TEXT_STARTS, 3))
        feeds += [_floats(within_text(back), 3) for back in range(1, layer.states.config.kernel)]
    return nodes.finished(feeds)


def _floats(name: str, rank: int) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * rank)


RoutedInputs = tuple[npt.NDArray[np.intp], Float32Array]
"""Indices [n], among all tokens of a pass, of those that the router sent to an expert, and the inputs [n, K] of one of
its linears for them."""
ExpertWeights = tuple[FusedLinear, Float32Array, Float32Array | None]
"""A linear of all experts, its matrix [N, K], expert by expert as the checkpoint stores it, and its biases [N]."""


def expert_of(linear: str, expert: int) -> str:
    """Name under which the statistics of one expert of a linear are known."""
    return f"{linear}.{expert}"


def run_experts(
    config: ExpertsConfig, gate_up: ExpertWeights, down: ExpertWeights, normed: Float32Array, scores: Float32Array
) -> tuple[Float32Array, dict[str, RoutedInputs]]:
    """Send tokens through the experts that their scores select.

    Args:
        config: the experts.
        gate_up: the first linear of the experts.
        down: the second one.
        normed: inputs of router and experts, float32 [n, hidden].
        scores: outputs of the router, float32 [n, experts].

    Returns:
        The weighted sum of the outputs, float32 [n, hidden], and the inputs of both linears by `expert_of`.
    """
    output, routed = np.zeros_like(normed), {}
    for expert, (tokens, shares) in enumerate(_routes(config, scores)):
        inputs = normed[tokens]
        inner = _activated(config, gate_up[0], _product(gate_up, expert, inputs))
        output[tokens] += shares[:, None] * _product(down, expert, inner)
        routed[expert_of(gate_up[0].name, expert)] = tokens, inputs
        routed[expert_of(down[0].name, expert)] = tokens, inner
    return output, routed


def _product(weights: ExpertWeights, expert: int, inputs: Float32Array) -> Float32Array:
    """The outputs of a linear of one expert."""
    linear, matrix, bias = weights
    rows = len(matrix) // linear.experts
    part = slice(expert * rows, (expert + 1) * rows)
    product: Float32Array = inputs @ matrix[part].T
    return product if bias is None else product + bias[part]


def _routes(config: ExpertsConfig, scores: Float32Array) -> Iterator[tuple[npt.NDArray[np.intp], Float32Array]]:
    """For each expert the tokens that select it, and the factors of its outputs for them."""
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares = exponentials / exponentials.sum(axis=-1, keepdims=True)
    selected = np.zeros(scores.shape, bool)
    np.put_along_axis(selected, np.argsort(-scores, axis=-1, kind="stable")[:, : config.top_k], True, axis=-1)
    if config.normalized:
        shares = shares / np.where(selected, shares, 0).sum(axis=-1, keepdims=True)
    for expert in range(config.count):
        tokens = np.flatnonzero(selected[:, expert])
        yield tokens, shares[tokens, expert].astype(np.float32)


def _activated(config: ExpertsConfig, gate_up: FusedLinear, outputs: Float32Array) -> Float32Array:
    """gate * sigmoid(alpha * gate) * (up + offset), with the bounds of both."""
    if gate_up.stacked:
        gate, up = outputs[:, ::2], outputs[:, 1::2]
    else:
        gate, up = np.split(outputs, 2, axis=-1)
    if config.limit is not None:
        gate, up = np.minimum(gate, config.limit), np.clip(up, -config.limit, config.limit)
    with np.errstate(over="ignore"):  # exp overflows far below zero, where the quotient is zero
        activated = gate / (1 + np.exp(-config.alpha * gate))
    return np.asarray(activated * (up + config.up_offset), np.float32)
