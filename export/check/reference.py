"""Reference decoder in float64 NumPy, with the full attention matrix and no cache, and references of draft heads.

Exported graphs are compared with it, so it shares no code with their construction: attention, norms, experts and layers
with a state are computed from their definitions. The settings are those that config.json was parsed to. Only a chunk of
one matrix is in memory at a time. EAGLE-3 and multi-token-prediction heads run token by token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..architectures.state_layers import ConvolutionConfig
from ..checkpoint.config import SILU, DecoderConfig
from ..checkpoint.layer_weights import FusedLinear, Layer, Norm
from ..checkpoint.layout import embedding_layout, final_norm, head_layout, layer_layout, per_layer_inputs_layout
from ..checkpoint.source import ModelSource
from ..graph.head_parts import FeatureHead
from . import reference_operations as operations
from .reference_operations import Float64Array

TokenArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Reference:
    """A decoder in float64.

    Attributes:
        weights: the checkpoint's tensors by their Hugging Face names.
        config: the settings of the model.
        context: number of positions that the exported graph supports; some RoPE scalings depend on it.
        kept: keys and values of layers, float64 [n, kv heads, head size], which later layers may share.
    """

    weights: ModelSource
    config: DecoderConfig
    context: int
    kept: dict[int, tuple[Float64Array, Float64Array]] = field(default_factory=dict)

    def embedded(self, tokens: TokenArray) -> Float64Array:
        """Embeddings of tokens, float64 [n, hidden]."""
        return operations.looked_up(self.weights, embedding_layout(self.config), tokens) * self.config.embedding_scale

    def states(self, tokens: TokenArray) -> list[Float64Array]:
        """Compute the residual stream, float64 [n, hidden] each: what enters every layer, and what the last returns."""
        states = [self.embedded(tokens)]
        inputs = self._layer_inputs(tokens, states[0])
        for index in range(self.config.layers):
            states.append(self.layer(index, states[-1], None if inputs is None else inputs[:, index]))
        return states

    def norm(self, norm: Norm | None, value: Float64Array) -> Float64Array:
        """Scale the last axis to root mean square 1, times the weights; None does nothing."""
        if norm is None:
            return value
        weight = self.weights.read(norm.weight).astype(np.float64) + self.config.traits.norms_add_one
        return operations.rms_norm(value, self.config.norm_epsilon) * weight

    def logits(self, normed: Float64Array) -> Float64Array:
        """The logits of the last norm's outputs, float64 [n, vocabulary]."""
        product = operations.linear(self.weights, head_layout(self.config), normed) * self.config.logits_scale
        return operations.soft_capped(product, self.config.logits_softcap)

    def layer(
        self,
        index: int,
        hidden: Float64Array,
        own_input: Float64Array | None = None,
        normed: Float64Array | None = None,
    ) -> Float64Array:
        """Run one layer over the residual stream, float64 [n, hidden]; `normed` replaces what its attention reads."""
        layer, scale = layer_layout(self.config, index), self.config.residual_scale
        mixed = self._mixed(index, layer, self.norm(layer.before_attention, hidden) if normed is None else normed)
        mixed = operations.linear(self.weights, layer.output, mixed)
        hidden = hidden + self.norm(layer.after_attention, mixed) * scale
        expanded = self._feed_forward(layer, self.norm(layer.before_mlp, hidden))
        hidden = hidden + self.norm(layer.after_mlp, expanded) * scale
        if layer.own_input is not None and own_input is not None:
            gated = operations.gelu_tanh(operations.linear(self.weights, layer.own_input.gate, hidden)) * own_input
            read = operations.linear(self.weights, layer.own_input.output, gated)
            hidden = hidden + self.norm(layer.own_input.after, read)
        return hidden if layer.scale is None else hidden * self.weights.read(layer.scale).astype(np.float64)

    def _layer_inputs(self, tokens: TokenArray, embedded: Float64Array) -> Float64Array | None:
        """What each layer of Gemma 3n and 4 reads of every token, float64 [n, layers, width]."""
        layout = per_layer_inputs_layout(self.config)
        if layout is None:
            return None
        width = self.config.per_layer_width
        projected = operations.linear(self.weights, layout.projection, embedded) / math.sqrt(embedded.shape[-1])
        normed = self.norm(layout.norm, projected.reshape(len(tokens), -1, width))
        own = operations.looked_up(self.weights, layout.table, tokens).reshape(normed.shape) * math.sqrt(width)
        return np.asarray((normed + own) / math.sqrt(2))

    def _mixed(self, index: int, layer: Layer, normed: Float64Array) -> Float64Array:
        """The inputs of the layer's output projection."""
        if layer.states is None:
            return self._attention(index, layer, normed)
        projected = operations.linear(self.weights, layer.qkv, normed)
        match layer.states.config:
            case ConvolutionConfig():
                return operations.convolution(self.weights, layer.states, projected)
            case config if layer.gates is not None:
                gates = operations.linear(self.weights, layer.gates, normed)
                return operations.delta_net(
                    self.weights, layer.states, config, projected, gates, self.config.norm_epsilon
                )
            case config:
                return operations.mamba2(self.weights, layer.states, config, projected, self.config.norm_epsilon)

    def _attention(self, index: int, layer: Layer, normed: Float64Array) -> Float64Array:
        """The attended values of all heads, float64 [n, heads * head size]."""
        config, settings, length = self.config, self.config.attention[index], len(normed)
        dim, gate = settings.head_dim, None
        width = config.heads * dim
        query, *others = np.split(
            operations.linear(self.weights, layer.qkv, normed),
            np.cumsum([width * (2 if config.traits.gated_attention else 1), settings.kv_width]),
            axis=-1,
        )
        if config.traits.gated_attention:
            query, gate = (
                each.reshape(length, -1) for each in np.split(query.reshape(length, config.heads, -1), 2, -1)
            )
        query = self._heads(index, query, layer.query_norm)
        if settings.owner is None:
            key, value = others[0], others[0 if settings.keys_as_values else 1].reshape(length, -1, dim)
            value = operations.rms_norm(value, config.norm_epsilon) if config.traits.value_norm else value
            self.kept[index] = self._heads(index, key, layer.key_norm), value
        keys, values = self.kept[index if settings.owner is None else settings.owner]
        if config.query_scaling is not None:
            turns = np.arange(length)[:, None, None] // config.query_scaling.original_positions
            query = query * (1 + config.query_scaling.beta * np.log(1 + turns))
        scale = dim**-0.5 if config.attention_scale is None else config.attention_scale
        attended, masked = np.empty_like(query), masked_positions(config, index, length)
        sinks = None if layer.sinks is None else self.weights.read(layer.sinks)
        for head in range(config.heads):
            group = head // (config.heads // settings.kv_heads)
            scores = operations.soft_capped(query[:, head] @ keys[:, group].T * scale, config.attention_softcap)
            scores[masked] = -np.inf
            if sinks is not None:
                scores = np.concatenate([scores, np.full((length, 1), sinks[head])], axis=-1)
            attended[:, head] = operations.softmax(scores)[:, :length] @ values[:, group]
        attended = attended.reshape(length, -1)
        return attended if gate is None else attended * operations.sigmoid(gate)

    def _heads(self, index: int, value: Float64Array, norm: Norm | None) -> Float64Array:
        """Queries or keys as heads, normed and rotated, float64 [n, heads, head size]."""
        settings, length = self.config.attention[index], len(value)
        whole = self.config.traits.head_norm == "whole"
        heads = (self.norm(norm, value) if whole else value).reshape(length, -1, settings.head_dim)
        heads = heads if whole else self.norm(norm, heads)
        if settings.rope is None:
            return heads
        factor = settings.rope.attention_factor
        angles = np.arange(length)[:, None] * settings.rope.frequencies(settings.rotated_channels, self.context)
        return operations.rotate(heads, np.cos(angles) * factor, np.sin(angles) * factor)

    def _feed_forward(self, layer: Layer, normed: Float64Array) -> Float64Array:
        """The feed-forward of one layer, with or without experts, float64 [n, hidden]."""
        experts = self.config.experts
        if layer.router is None or experts is None:
            return self._gated(layer.gate_up, layer.down, normed)
        output = operations.routed(self.weights, layer, layer.router, experts, normed)
        if layer.shared is None:
            return output
        shared = self._gated(layer.shared.gate_up, layer.shared.down, normed)
        gate = layer.shared.gate
        return output + (
            shared if gate is None else shared * operations.sigmoid(operations.linear(self.weights, gate, normed))
        )

    def _gated(self, gate_up: FusedLinear, down: FusedLinear, value: Float64Array) -> Float64Array:
        gate, up = np.split(operations.linear(self.weights, gate_up, value), 2, axis=-1)
        opened = operations.silu(gate) if self.config.activation == SILU else operations.gelu_tanh(gate)
        return operations.linear(self.weights, down, opened * up)


def reference_logits(weights: ModelSource, config: DecoderConfig, tokens: TokenArray, context: int) -> Float64Array:
    """Compute the logits of every position, float64 [n, vocabulary], of token ids int64 [n]; see `Reference`."""
    reference = Reference(weights, config, context)
    return reference.logits(reference.norm(final_norm(config), reference.states(tokens)[-1]))


def masked_positions(config: DecoderConfig, layer: int, length: int) -> npt.NDArray[np.bool_]:
    """Whether a layer's query in a row does not see the key in a column, bool [length, length]."""
    distance, window = np.arange(length)[:, None] - np.arange(length), config.attention[layer].window
    return np.asarray((distance < 0) | (distance >= (length if window is None else window)))


def reference_head(
    head: FeatureHead,
    weights: ModelSource,
    embeddings: Float64Array,
    features: Float64Array,
    context: int,
    target: tuple[ModelSource, ModelSource] | None = None,
) -> tuple[Float64Array, Float64Array]:
    """Run a head over a sequence: first over tokens with the target's features, then from its own states.

    Args:
        head: the head.
        weights: its tensors.
        embeddings: embeddings of the tokens, float64 [n, hidden]; each is the one after that its features belong to.
        features: the target's features of the first tokens, float64 [k, features], k at least 1.
        context: number of positions that the exported graph supports.
        target: for a multi-token-prediction module, the target's tensors that its graph has, of which the module uses
            the LM head, and those of the checkpoint, which calibration may have scaled in the former.

    Returns:
        Logits of every token, float64 [n, draft vocabulary], and states, float64 [n, hidden]: the outputs of the layer
        before the last norm, of a module after it.
    """
    reference, last = Reference(weights, head.config, context), final_norm(head.config)
    embedded, features = reference.norm(head.norms[0], embeddings), features[: len(embeddings)]
    if target is None:
        given = [*operations.linear(weights, head.projection, features)]
    else:
        used, original = (Reference(each, head.config, context) for each in target)
        given = [*original.norm(last, features)]
    while True:
        hidden = np.array(given)
        both = np.concatenate([embedded[: len(given)], reference.norm(head.norms[1], hidden)], axis=-1)
        if target is None:
            states = reference.layer(0, hidden, normed=both)
        else:
            states = reference.norm(last, reference.layer(0, operations.linear(weights, head.projection, both)))
        if len(given) == len(embeddings):
            break
        given.append(states[-1])
    if head.lm_head is not None:
        return operations.linear(weights, head.lm_head, reference.norm(last, states)), states
    # Where calibration multiplied the columns of the LM head, it divided the norm before it.
    ones = np.ones((1, states.shape[-1]))
    return used.logits(states * (used.norm(last, ones) / original.norm(last, ones))), states


def reference_medusa(weights: ModelSource, heads: Sequence[Sequence[FusedLinear]], state: Float64Array) -> Float64Array:
    """Run Medusa heads, each of residual blocks and an LM head, over the target's last hidden state, float64 [hidden].

    Returns:
        Logits of every head, float64 [heads, vocabulary].
    """
    logits = []
    for *blocks, output in heads:
        hidden = state
        for block in blocks:
            hidden = hidden + operations.silu(operations.linear(weights, block, hidden))
        logits.append(operations.linear(weights, output, hidden))
    return np.array(logits)
