"""Graphs of half a decoder layer with its weights as inputs.

Attention and feed-forward are built by the code that builds the exported graph, but matrices and vectors become graph
inputs instead of initializers. So one graph serves all layers of a kind, and quantized weights can be fed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import FusedLinear, Norm
from ..checkpoint.layout import layer_layout
from ..graph import inputs_outputs
from ..graph.attention import Attention
from ..graph.decoder import IR_VERSION, OPSET
from ..graph.delta_net import append_delta_net
from ..graph.feed_forward import append_feed_forward, append_shared_expert
from ..graph.initializers import Initializers
from ..graph.linear_attention import append_convolution
from ..graph.mamba2 import append_mamba
from ..graph.nodes import MICROSOFT, Nodes

HIDDEN: Final = "hidden"
"""Name of the input: hidden states before the half, [B, S, hidden]."""
TEXT_STARTS: Final = "text_starts"
"""Name of the input with `Batch.text_starts`."""
_SUM: Final = "sum"
"""Name of the output: hidden states after the half."""


@dataclass(frozen=True)
class Vector:
    """A vector input: checkpoint vectors concatenated, with `plus` added to each element."""

    sources: tuple[str, ...]
    plus: float = 0.0
    tap: int | None = None
    """Which token of the kernels `[channels, 1, kernel]` of a convolution; None for sources that are vectors."""


@dataclass(frozen=True)
class HalfLayer:
    """A graph of half a layer, and what its inputs take besides the hidden states."""

    model: ModelProto
    vectors: dict[str, Vector]
    """Norms and biases, by the name of the input; the sources are those of the layer that the graph was built for."""
    matrices: dict[str, FusedLinear]
    """Linears, by the name of the input that takes their matrix [N, K]."""
    captured: dict[str, str]
    """Name of the value [B, S, K] that a linear multiplies, an output or `HIDDEN`, by the linear's name."""
    output: str = _SUM


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

    def __init__(self, config: DecoderConfig) -> None:
        self.fed = _FedWeights()
        super().__init__(config, {}, self.fed)
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
        self.add("Add", [HIDDEN, value], _SUM)

    def finished(self, feeds: Sequence[ValueInfoProto]) -> HalfLayer:
        """The graph, whose inputs are the hidden states, `feeds`, and the weights that its nodes use."""
        hidden, names = _floats(HIDDEN, 3), self.fed.vectors
        captured = [value for value in dict.fromkeys(self.inputs_of.values()) if value != HIDDEN]
        graph = helper.make_graph(
            self.protos,
            "half",
            [hidden, *feeds, *(_floats(name, 1) for name in names), *(_floats(name, 2) for name in self.matrices)],
            [_floats(name, 3) for name in (_SUM, *captured)],
            self.fed.protos,
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
        return HalfLayer(model, dict(names), self.matrices, self.inputs_of)


class _FreeAttention(Attention):
    """Attention with a mask given by the caller, which includes a layer's sliding window."""

    def _window_bias(self, window: int) -> str:  # noqa: ARG002 -- the bias includes it
        return "attention_bias"


def attention_half(config: DecoderConfig, index: int, context: int) -> HalfLayer:
    """Build norm, attention and output projection of layer `index`.

    Besides the inputs of every half, the graph has `position_ids` int64 [B, S], `attention_bias` float32 [B, 1, S, S],
    `seqlens_k` int32 [B] and `total_sequence_length` as GroupQueryAttention defines them, and empty past keys and
    values.
    """
    nodes, layer = _FedNodes(config), layer_layout(config, index)
    attended = _FreeAttention(nodes, context).append(index, layer, _normed(nodes, layer.before_attention))
    nodes.add_residual(nodes.linear(layer.output, attended), layer.after_attention)
    used = {name for node in nodes.protos for name in node.input}
    past = [_floats(name(index), 4) for name in (inputs_outputs.past_key, inputs_outputs.past_value)]
    declared = [
        helper.make_tensor_value_info("position_ids", TensorProto.INT64, [None, None]),
        _floats("attention_bias", 4),
        helper.make_tensor_value_info("seqlens_k", TensorProto.INT32, [None]),
        helper.make_tensor_value_info("total_sequence_length", TensorProto.INT32, []),
    ]
    return nodes.finished([*(each for each in declared if each.name in used), *past])


def within_text(back: int) -> str:
    """Name of the input that says which tokens have one of their own text that far before them."""
    return f"within_text.{back}"


def state_half(config: DecoderConfig, index: int) -> HalfLayer:
    """Build norm, convolution or linear attention, and output projection of layer `index`.

    Besides the inputs of every half, the graph has the states before the first token, `Batch.within_text` for every
    token that a kernel reaches back, for linear attention `TEXT_STARTS`, and the layer's vectors and kernels.

    Raises:
        ValueError: The layer has attention.
    """
    nodes, layer = _FedNodes(config), layer_layout(config, index)
    normed = _normed(nodes, layer.before_attention)
    states = [_floats(inputs_outputs.past_conv(index), 3)]
    if layer.convolution is not None:
        kernel = layer.convolution.kernel
        mixed = append_convolution(nodes, index, layer, layer.convolution, normed)
    elif layer.recurrent is not None:
        kernel = layer.recurrent.config.kernel
        if layer.delta_net is not None:
            mixed = append_delta_net(nodes, index, layer, layer.delta_net, normed)
        elif layer.mamba is not None:
            mixed = append_mamba(nodes, index, layer, layer.mamba, normed)
        states += [_floats(inputs_outputs.past_recurrent(index), 4), _floats(inputs_outputs.past_updates(index), 3)]
        states.append(_floats(TEXT_STARTS, 3))
    else:
        raise ValueError(f"layer {index} has no states but a cache")
    nodes.add_residual(nodes.linear(layer.output, mixed), layer.after_attention)
    return nodes.finished([*states, *(_floats(within_text(back), 3) for back in range(1, kernel))])


def router_half(config: DecoderConfig, index: int) -> HalfLayer:
    """Build norm, router and shared expert of layer `index`.

    In place of hidden states the graph returns the scores of the experts, [B, S, experts], and behind them in the last
    axis, where the layer has a shared expert, what that computes, [B, S, hidden].

    Raises:
        ValueError: The layer has no experts.
    """
    nodes, layer = _FedNodes(config), layer_layout(config, index)
    if layer.router is None:
        raise ValueError(f"layer {index} has no experts")
    normed = _normed(nodes, layer.before_mlp)
    scores = nodes.linear(layer.router, normed)
    shared = [] if layer.shared is None else [append_shared_expert(nodes, index, layer.shared, normed)]
    nodes.add("Concat", [scores, *shared], _SUM, axis=-1)
    return nodes.finished([])


def feed_forward_half(config: DecoderConfig, index: int) -> HalfLayer:
    """Build norm and feed-forward of layer `index`."""
    nodes, layer = _FedNodes(config), layer_layout(config, index)
    output = append_feed_forward(nodes, index, layer, _normed(nodes, layer.before_mlp))
    nodes.add_residual(output, layer.after_mlp)
    return nodes.finished([])


def _normed(nodes: Nodes, norm: Norm | None) -> str:
    return HIDDEN if norm is None else nodes.norm(HIDDEN, norm, "normed")


def _floats(name: str, rank: int) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * rank)
