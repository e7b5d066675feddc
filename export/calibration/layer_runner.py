"""Runs a model half a layer at a time in ONNX Runtime.

The matrices are fed as inputs. Only the weights of one linear have to be in memory, and any of them can be replaced by
quantized ones. Texts run in batches (`text_batches`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, helper

from ..bundle_content import SourceModel
from ..check.contract_session import ModelSession
from ..check.reference_operations import rms_norm
from ..checkpoint.config import DecoderConfig, LayerAttention
from ..checkpoint.layer_weights import FusedLinear, Layer
from ..checkpoint.layout import embedding_layout, final_norm, head_layout, layer_layout
from ..checkpoint.source import Float32Array, RowRange
from ..graph import inputs_outputs
from ..graph.decoder import IR_VERSION, OPSET
from ..graph.nodes import MICROSOFT
from .layer_graphs import (
    HIDDEN,
    TEXT_STARTS,
    ExpertWeights,
    HalfLayer,
    RoutedInputs,
    Vector,
    attention_half,
    feed_forward_half,
    router_half,
    run_experts,
    state_half,
    within_text,
)
from .text_batches import Batch

WeightsOf = Callable[[FusedLinear], Float32Array]
"""Returns the matrix [N, K] of a linear."""

CONCURRENT_PASSES: Final = 2
"""Number of passes that may run at the same time: two that share the cores are faster than one that has them all."""
_MAX_LOGITS: Final = 1 << 24
"""Approximate number of logits in memory at a time."""


@dataclass(frozen=True)
class _Half:
    """A loaded half layer, and the index of the layer that it was built for."""

    graph: HalfLayer
    session: ModelSession
    index: int


class LayerRunner:
    """Runs a decoder half a layer at a time; hidden states are float32 [B, S, hidden]."""

    def __init__(self, model: SourceModel) -> None:
        """Load the graphs of norm and head; those of half layers are loaded when needed."""
        config = model.config
        self.source = model.source
        self.config = config
        self._context = model.context
        self._mixers: dict[LayerAttention | None, _Half] = {}
        """Attention halves by their kind; that of the other layers, which are of one kind, by None."""
        self._feed_forwards: dict[bool, _Half] = {}
        """Dense feed-forwards, and routers where the key is true."""
        self._norm = _session(_norm_graph(config))
        self._head = _session(_head_graph(config))
        self._vectors: dict[tuple[tuple[str, ...], float, int | None], Float32Array] = {}

    def matrix(self, linear: FusedLinear) -> Float32Array:
        """A linear's matrix from the checkpoint, float32 [N, K].

        Raises:
            CheckpointError: A tensor cannot be read.
        """
        matrix, row = np.empty(linear.shape, np.float32), 0
        for name in linear.weights:
            for chunk in self.source.chunks(name):
                matrix[row : row + len(chunk)] = chunk
                row += len(chunk)
        return matrix

    def embed(self, batch: Batch, matrix: Float32Array | None = None) -> Float32Array:
        """Hidden states before the first layer; `matrix` replaces the checkpoint's embedding."""
        if matrix is None:
            name = embedding_layout(self.config).weights[0]
            ids, where = np.unique(batch.tokens, return_inverse=True)
            rows = [self.source.read_rows(RowRange(name, token, token + 1)) for token in ids.tolist()]
            hidden = np.concatenate(rows)[where.reshape(batch.tokens.shape)]
        else:
            hidden = matrix[batch.tokens]
        return np.asarray(hidden * np.float32(self.config.embedding_scale), np.float32)

    def mixer(self, index: int, hidden: Float32Array, batch: Batch, weights_of: WeightsOf) -> Float32Array:
        """Hidden states after the attention, or the convolution, of layer `index`."""
        half = self._mixer_half(index)
        return self._run(half, index, hidden, weights_of, self._mixer_feeds(half, index, batch), [])[0]

    def feed_forward(self, index: int, hidden: Float32Array, weights_of: WeightsOf) -> Float32Array:
        """Hidden states after the feed-forward of layer `index`."""
        if layer_layout(self.config, index).router is not None:
            return self._experts(index, hidden, weights_of)[0]
        return self._run(self._feed_forward_half(index), index, hidden, weights_of, {}, [])[0]

    def captured(
        self, index: int, hidden: Float32Array, batch: Batch, weights_of: WeightsOf
    ) -> tuple[Float32Array, dict[str, Float32Array], dict[str, RoutedInputs]]:
        """Hidden states after layer `index`, and the inputs of its linears.

        Returns:
            The states; the inputs by the names of linears, float32 [B, S, K]; those of single experts by `expert_of`.
        """
        middle, first = self.mixer_captured(index, hidden, batch, weights_of)
        after, second, routed = self._feed_forward_captured(index, middle, weights_of)
        return after, {**first, **second}, routed

    def mixer_captured(
        self, index: int, hidden: Float32Array, batch: Batch, weights_of: WeightsOf
    ) -> tuple[Float32Array, dict[str, Float32Array]]:
        """Hidden states as after `mixer`, and the inputs of its linears by their names."""
        half = self._mixer_half(index)
        return self._captured(half, index, hidden, weights_of, self._mixer_feeds(half, index, batch))

    def feed_forward_captured(
        self, index: int, hidden: Float32Array, weights_of: WeightsOf
    ) -> tuple[Float32Array, dict[str, Float32Array]]:
        """Hidden states after the feed-forward of layer `index`, and the inputs of its linears by their names.

        The linears of experts, which get inputs of their own each, are not among them.
        """
        return self._feed_forward_captured(index, hidden, weights_of)[:2]

    def head_inputs(self, states: Float32Array) -> Float32Array:
        """Inputs of the head, float32 [R, hidden], from hidden states [R, hidden] after the last layer."""
        norm = final_norm(self.config)
        weight = self._vector((norm.weight,), Vector((), float(self.config.traits.norms_add_one)))
        return self._norm.run(["normed"], {HIDDEN: states, "norm": weight})[0]

    def logits(self, states: Float32Array, weights_of: WeightsOf) -> Float32Array:
        """Logits, float32 [R, vocabulary], from hidden states [R, hidden] after the last layer."""
        matrix = weights_of(head_layout(self.config))
        return self._head.run(["logits"], {"inputs": self.head_inputs(states), "head": matrix})[0]

    @property
    def logits_batch(self) -> int:
        """Number of positions whose logits fit into memory at once."""
        return max(1, _MAX_LOGITS // self.config.vocab_size)

    def _captured(
        self, half: _Half, index: int, hidden: Float32Array, weights_of: WeightsOf, feeds: Mapping[str, Any]
    ) -> tuple[Float32Array, dict[str, Float32Array]]:
        outputs = [name for name in dict.fromkeys(half.graph.captured.values()) if name != HIDDEN]
        after, *values = self._run(half, index, hidden, weights_of, feeds, outputs)
        found = {HIDDEN: hidden, **dict(zip(outputs, values, strict=True))}
        names = {linear.name: _of_layer(linear.name, half.index, index) for linear in half.graph.matrices.values()}
        return after, {names[linear]: found[value] for linear, value in half.graph.captured.items()}

    def _run(
        self,
        half: _Half,
        index: int,
        hidden: Float32Array,
        weights_of: WeightsOf,
        feeds: Mapping[str, Any],
        outputs: list[str],
    ) -> list[Float32Array]:
        linears = {linear.name: linear for linear in layer_layout(self.config, index).linears}
        matrices = {
            name: weights_of(linears[_of_layer(linear.name, half.index, index)])
            for name, linear in half.graph.matrices.items()
        }
        vectors = {
            name: self._vector(tuple(_of_layer(each, half.index, index) for each in vector.sources), vector)
            for name, vector in half.graph.vectors.items()
        }
        return half.session.run([half.graph.output, *outputs], {HIDDEN: hidden, **matrices, **vectors, **feeds})

    def _mixer_half(self, index: int) -> _Half:
        has_attention = index not in {*self.config.convolution_layers, *self.config.recurrent_layers}
        kind = self.config.attention[index] if has_attention else None
        if kind not in self._mixers:
            graph = (
                attention_half(self.config, index, self._context) if has_attention else state_half(self.config, index)
            )
            self._mixers[kind] = _Half(graph, _session(graph.model), index)
        return self._mixers[kind]

    def _feed_forward_half(self, index: int) -> _Half:
        routed = layer_layout(self.config, index).router is not None
        if routed not in self._feed_forwards:
            graph = router_half(self.config, index) if routed else feed_forward_half(self.config, index)
            self._feed_forwards[routed] = _Half(graph, _session(graph.model), index)
        return self._feed_forwards[routed]

    def _feed_forward_captured(
        self, index: int, hidden: Float32Array, weights_of: WeightsOf
    ) -> tuple[Float32Array, dict[str, Float32Array], dict[str, RoutedInputs]]:
        if layer_layout(self.config, index).router is not None:
            return self._experts(index, hidden, weights_of)
        half = self._feed_forward_half(index)
        return *self._captured(half, index, hidden, weights_of, {}), {}

    def _experts(
        self, index: int, hidden: Float32Array, weights_of: WeightsOf
    ) -> tuple[Float32Array, dict[str, Float32Array], dict[str, RoutedInputs]]:
        """Hidden states after experts, the inputs of router and shared expert, and those of the selected experts."""
        config, layer = self.config, layer_layout(self.config, index)
        if config.experts is None or layer.router is None:
            raise ValueError(f"layer {index} has no experts")
        outputs, inputs = self._captured(self._feed_forward_half(index), index, hidden, weights_of, {})
        scores, shared = np.split(outputs.reshape(-1, outputs.shape[-1]), [config.experts.count], axis=-1)
        gate_up, down = (
            ExpertWeights(linear, weights_of(linear), self._biases(linear)) for linear in (layer.gate_up, layer.down)
        )
        normed = inputs[layer.router.name].reshape(-1, config.hidden_size)
        output, routed = run_experts(config.experts, gate_up, down, normed, scores)
        if layer.shared is not None:
            output = output + shared
        if layer.after_mlp is not None:
            weight = self._vector((layer.after_mlp.weight,), Vector((), float(config.traits.norms_add_one)))
            output = (rms_norm(output.astype(np.float64), config.norm_epsilon) * weight).astype(np.float32)
        after = hidden + np.float32(config.residual_scale) * output.reshape(hidden.shape)
        return after, inputs, routed

    def _biases(self, linear: FusedLinear) -> Float32Array | None:
        """The biases of all experts of a linear, float32 [N]; None for a linear without."""
        if not linear.biased:
            return None
        return np.concatenate([self.source.read(name).reshape(-1) for name in linear.biases])

    def _mixer_feeds(self, half: _Half, index: int, batch: Batch) -> dict[str, npt.NDArray[Any]]:
        names = {value.name for value in half.graph.model.graph.input}
        return {name: value for name, value in self._feeds(half, index, batch).items() if name in names}

    def _feeds(self, half: _Half, index: int, batch: Batch) -> dict[str, npt.NDArray[Any]]:
        rows, slots = batch.tokens.shape
        layer = layer_layout(self.config, index)
        if layer.convolution is not None or layer.recurrent is not None:
            return self._states(half, layer, batch)
        empty = np.zeros((rows, self.config.kv_heads, 0, self.config.head_dim), np.float32)
        return {
            "position_ids": batch.positions,
            "attention_bias": batch.bias(self.config.attention[index].window),
            "seqlens_k": np.full(rows, slots - 1, np.int32),
            "total_sequence_length": np.array(slots, np.int32),
            inputs_outputs.past_key(half.index): empty,
            inputs_outputs.past_value(half.index): empty,
        }

    def _states(self, half: _Half, layer: Layer, batch: Batch) -> dict[str, npt.NDArray[Any]]:
        """Empty states, and where texts begin."""
        rows, feeds = len(batch.tokens), {}
        convolution = layer.convolution
        if layer.recurrent is not None:
            config, convolution = layer.recurrent.config, layer.recurrent.convolution
            matrix = (rows, config.value_heads, config.key_dim, config.value_dim)
            feeds = {
                inputs_outputs.past_recurrent(half.index): np.zeros(matrix, np.float32),
                inputs_outputs.past_updates(half.index): np.zeros((rows, 0, config.update_width), np.float32),
                TEXT_STARTS: batch.text_starts(),
            }
        if convolution is None:
            raise ValueError("the layer has no states")
        before = np.zeros((rows, convolution.kernel - 1, convolution.channels), np.float32)
        masks = {within_text(back): batch.within_text(back) for back in range(1, convolution.kernel)}
        return {inputs_outputs.past_conv(half.index): before, **masks, **feeds}

    def _vector(self, sources: tuple[str, ...], vector: Vector) -> Float32Array:
        """The value of a vector input, read from these tensors."""
        key = sources, vector.plus, vector.tap
        if key not in self._vectors:
            tensors = [self.source.read(name) for name in sources]
            value = np.concatenate([each if vector.tap is None else each[:, 0, vector.tap] for each in tensors])
            self._vectors[key] = value + np.float32(vector.plus)
        return self._vectors[key]


def _session(model: ModelProto) -> ModelSession:
    return ModelSession(model, Path(), max(1, (os.cpu_count() or 1) // CONCURRENT_PASSES))


def _of_layer(name: str, built_for: int, index: int) -> str:
    """The name that a linear or tensor of one layer has in another."""
    return name.replace(f"layers.{built_for}.", f"layers.{index}.", 1)


def _norm_graph(config: DecoderConfig) -> ModelProto:
    """The final norm, and the scale of the logits, applied to the head's inputs as in `graph.embedding_head`."""
    factor = config.logits_scale / (config.logits_softcap or 1.0)
    norm = helper.make_node(
        "SimplifiedLayerNormalization",
        [HIDDEN, "norm"],
        ["unscaled"],
        axis=-1,
        epsilon=config.norm_epsilon,
        stash_type=1,
    )
    scaled = helper.make_node("Mul", ["unscaled", "scale"], ["normed"])
    return _model([norm, scaled], {HIDDEN: 2, "norm": 1}, "normed", {"scale": factor})


def _head_graph(config: DecoderConfig) -> ModelProto:
    """Product and soft cap of the logits, as in `graph.embedding_head`."""
    cap = config.logits_softcap
    product = helper.make_node("Gemm", ["inputs", "head"], ["logits" if cap is None else "product"], transB=1)
    if cap is None:
        return _model([product], {"inputs": 2, "head": 2}, "logits", {})
    bounded = helper.make_node("Tanh", ["product"], ["bounded"])
    capped = helper.make_node("Mul", ["bounded", "cap"], ["logits"])
    return _model([product, bounded, capped], {"inputs": 2, "head": 2}, "logits", {"cap": cap})


def _model(nodes: list[NodeProto], inputs: Mapping[str, int], output: str, scalars: Mapping[str, float]) -> ModelProto:
    """A graph with float32 inputs, given with their ranks, and one output of rank 2."""
    floats = TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "head",
        [helper.make_tensor_value_info(name, floats, [None] * rank) for name, rank in inputs.items()],
        [helper.make_tensor_value_info(output, floats, [None, None])],
        [helper.make_tensor(name, floats, [], [value]) for name, value in scalars.items()],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
