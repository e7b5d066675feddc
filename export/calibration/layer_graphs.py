"""One half of a decoder layer as a graph of its own, with its weights as inputs.

Attention and feed-forward are built by the code that builds the exported graph, on nodes that take what they would
store from the caller instead: matrices and vectors become inputs of the graph. So one graph serves all layers of a
kind, and any rounded weights can be fed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from ..checkpoint.config import DecoderConfig
from ..checkpoint.layout import FusedLinear, Norm, layer_layout
from ..graph import inputs_outputs
from ..graph.attention import Attention
from ..graph.decoder import IR_VERSION, OPSET
from ..graph.feed_forward import append_feed_forward
from ..graph.initializers import Initializers
from ..graph.nodes import MICROSOFT, Nodes

HIDDEN: Final = "hidden"
"""Input: the residual before the half, [B, S, hidden]."""
_JOINED: Final = "joined"
"""Output: the residual after it."""


@dataclass(frozen=True)
class Vector:
    """A small input: checkpoint vectors one after the other, `plus` added to each number."""

    sources: tuple[str, ...]
    plus: float


@dataclass(frozen=True)
class HalfLayer:
    """A graph, and what to feed it besides the hidden states."""

    model: ModelProto
    vectors: dict[str, Vector]
    """Norms and biases by input; their sources are those of the layer it was built for."""
    matrices: dict[str, FusedLinear]
    """Units by the input that takes their matrix [N, K]."""
    captured: dict[str, str]
    """By the name of a unit, the value [B, S, K] that it multiplies: an output, or `HIDDEN`."""
    output: str = _JOINED


class _FedWeights(Initializers):
    """Small constants stay in the graph; vectors become inputs of it."""

    def __init__(self) -> None:
        # Nothing is read or written here, so there is no checkpoint and no file to begin with.
        self.protos: list[TensorProto] = []
        self.vectors: dict[str, Vector] = {}

    def constant(self, name: str, value: npt.NDArray[np.generic]) -> str:
        self.protos.append(numpy_helper.from_array(value, name))
        return name

    def vector(self, name: str, sources: Sequence[str], plus: float = 0.0) -> str:
        self.vectors[name] = Vector(tuple(sources), plus)
        return name


class _FedNodes(Nodes):
    """Linears multiply by matrices that are inputs."""

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

    def joined(self, value: str, after: Norm | None) -> None:
        """What the half makes of the residual and its own output."""
        if after is not None:
            value = self.norm(value, after, "after")
        value = self.scaled(value, self.config.residual_scale, "residual.scale", "scaled")
        self.add("Add", [HIDDEN, value], _JOINED)

    def finished(self, feeds: Sequence[ValueInfoProto]) -> HalfLayer:
        """The graph, whose inputs are the hidden states, `feeds`, and what was asked of the weights."""
        hidden, names = _floats(HIDDEN, 3), self.fed.vectors
        captured = [value for value in dict.fromkeys(self.inputs_of.values()) if value != HIDDEN]
        graph = helper.make_graph(
            self.protos,
            "half",
            [hidden, *feeds, *(_floats(name, 1) for name in names), *(_floats(name, 2) for name in self.matrices)],
            [_floats(name, 3) for name in (_JOINED, *captured)],
            self.fed.protos,
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
        return HalfLayer(model, dict(names), self.matrices, self.inputs_of)


class _FreeAttention(Attention):
    """Attention whose mask is the caller's, a layer's window included."""

    def _window_bias(self, window: int) -> str:  # noqa: ARG002 -- the caller knows it
        return "attention_bias"


def attention_half(config: DecoderConfig, index: int, context: int) -> HalfLayer:
    """Norm, attention and output projection of layer `index`.

    Besides what every half takes: `position_ids` int64 [B, S], `attention_bias` float32 [B, 1, S, S], `seqlens_k` int32
    [B] and `total_sequence_length` as GroupQueryAttention wants them, and past keys and values of no rows.
    """
    nodes, layer = _FedNodes(config), layer_layout(config, index)
    attended = _FreeAttention(nodes, context).append(index, layer, _normed(nodes, layer.before_attention))
    nodes.joined(nodes.linear(layer.output, attended), layer.after_attention)
    used = {name for node in nodes.protos for name in node.input}
    past = [_floats(name(index), 4) for name in (inputs_outputs.past_key, inputs_outputs.past_value)]
    declared = [
        helper.make_tensor_value_info("position_ids", TensorProto.INT64, [None, None]),
        _floats("attention_bias", 4),
        helper.make_tensor_value_info("seqlens_k", TensorProto.INT32, [None]),
        helper.make_tensor_value_info("total_sequence_length", TensorProto.INT32, []),
    ]
    return nodes.finished([*(each for each in declared if each.name in used), *past])


def feed_forward_half(config: DecoderConfig, index: int) -> HalfLayer:
    """Norm and feed-forward of layer `index`."""
    nodes, layer = _FedNodes(config), layer_layout(config, index)
    fed = append_feed_forward(nodes, index, layer, _normed(nodes, layer.before_mlp))
    nodes.joined(fed, layer.after_mlp)
    return nodes.finished([])


def _normed(nodes: Nodes, norm: Norm | None) -> str:
    return HIDDEN if norm is None else nodes.norm(HIDDEN, norm, "normed")


def _floats(name: str, rank: int) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * rank)
