"""Runs a model half a layer at a time in ONNX Runtime.

The matrices are fed as inputs. Only the weights of one linear have to be in memory, and any of them can be replaced by
quantized ones. Texts run in batches (`text_batches`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from onnx import ModelProto

from ..architectures.state_layers import RecurrentConfig
from ..bundle_content import SourceModel
from ..check.reference_operations import rms_norm
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import FusedLinear, StateWeights
from ..checkpoint.layout import embedding_layout, final_norm, head_layout, layer_layout
from ..checkpoint.source import Float32Array, RowRange
from ..graph import inputs_outputs
from .layer_graphs import (
    HIDDEN,
    SUM,
    TEXT_STARTS,
    HalfLayer,
    RoutedInputs,
    Vector,
    concurrent_session,
    half_layer,
    run_experts,
    within_text,
)
from .logit_comparison import parsed_model
from .text_batches import Batch

WeightsOf = Callable[[FusedLinear], Float32Array]
"""Returns the matrix [N, K] of a linear."""
Captured = tuple[Float32Array, dict[str, Float32Array], dict[str, RoutedInputs]]
"""Hidden states after half a layer or a layer, and the inputs of linears and of single experts (`LayerRunner.half`)."""

_MAX_LOGITS: Final = 1 << 24
"""Approximate number of logits in memory at a time."""


class LayerRunner:
    """Runs a decoder half a layer at a time; hidden states are float32 [B, S, hidden]."""

    def __init__(self, model: SourceModel) -> None:
        """Load the graphs of norm and head; graphs of half layers are loaded when needed."""
        config = model.config
        self.source = model.source
        self.config = config
        self._context = model.context
        self._halves: dict[Hashable, HalfLayer] = {}
        """Graphs of half layers by their kind; attention has several."""
        self._norm = concurrent_session(norm_model(config))
        self._head = concurrent_session(head_model(config))
        self._vectors: dict[Vector, Float32Array] = {}

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

    def half_matrices(self, index: int, mixes: bool) -> dict[str, Float32Array]:
        """The matrices of the linears of half of layer `index`, by their names in the order of the graph."""
        layer = layer_layout(self.config, index)
        linears = layer.mixer_linears if mixes else layer.feed_forward_linears
        return {linear.name: self.matrix(linear) for linear in linears}

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

    def half(
        self,
        index: int,
        mixes: bool,
        hidden: Float32Array,
        batch: Batch,
        weights_of: WeightsOf,
        *,
        capture: bool = False,
    ) -> Captured:
        """Hidden states after the attention, or the convolution, of layer `index`; or after its feed-forward.

        Returns:
            The states; with `capture`, the inputs of its linears by their names, float32 [B, S, K]; the inputs of
            single experts by `expert_of`.
        """
        half, feeds = self.half_graph(index, mixes), self.feeds(index, mixes, hidden, batch, weights_of)
        if not mixes and layer_layout(self.config, index).router is not None:
            return self._experts(half, index, feeds, weights_of)
        return *self._run(half, index, feeds, capture), {}

    def half_graph(self, index: int, mixes: bool) -> HalfLayer:
        """The graph of half of layer `index`, or of another layer's with the same graph."""
        layer = layer_layout(self.config, index)
        routed = layer.router is not None
        kind = mixes, (layer.states is None and self.config.attention[index]) if mixes else routed
        if kind not in self._halves:
            self._halves[kind] = half_layer(self.config, index, mixes, self._context)
        return self._halves[kind]

    def feeds(
        self, index: int, mixes: bool, hidden: Float32Array, batch: Batch, weights_of: WeightsOf
    ) -> dict[str, npt.NDArray[Any]]:
        """All inputs of `half_graph`."""
        half, linears = self.half_graph(index, mixes), layer_layout(self.config, index).linears
        own = {linear.name: linear for linear in linears}
        weights = {name: weights_of(own[half.own(linear.name, index)]) for name, linear in half.matrices.items()}
        for name, vector in half.vectors.items():
            sources = tuple(half.own(source, index) for source in vector.sources)
            weights[name] = self._vector(vector._replace(sources=sources))
        return {HIDDEN: hidden, **weights, **(self._mixer_feeds(half, index, batch) if mixes else {})}

    def captured(self, index: int, hidden: Float32Array, batch: Batch, weights_of: WeightsOf) -> Captured:
        """Hidden states after layer `index`, and the inputs of its linears; see `half`."""
        middle, first, _ = self.half(index, True, hidden, batch, weights_of, capture=True)
        after, second, routed = self.half(index, False, middle, batch, weights_of, capture=True)
        return after, {**first, **second}, routed

    def head_inputs(self, states: Float32Array) -> Float32Array:
        """Inputs of the head, float32 [R, hidden], from hidden states [R, hidden] after the last layer."""
        return self._norm.run(["normed"], {HIDDEN: states, "norm": self.final_norm_weight()})[0]

    def final_norm_weight(self) -> Float32Array:
        """The weights of the final norm, float32 [hidden]."""
        return self._vector(Vector((final_norm(self.config).weight,), float(self.config.traits.norms_add_one)))

    def logits(self, states: Float32Array, weights_of: WeightsOf) -> Float32Array:
        """Logits, float32 [R, vocabulary], from hidden states [R, hidden] after the last layer."""
        matrix = weights_of(head_layout(self.config))
        return self._head.run(["logits"], {"inputs": self.head_inputs(states), "head": matrix})[0]

    @property
    def logits_batch(self) -> int:
        """Number of positions whose logits fit into memory at once."""
        return max(1, _MAX_LOGITS // self.config.vocab_size)

    def _run(
        self, half: HalfLayer, index: int, feeds: Mapping[str, Any], capture: bool
    ) -> tuple[Float32Array, dict[str, Float32Array]]:
        wanted = {half.own(linear, index): value for linear, value in half.captured.items()} if capture else {}
        outputs = [name for name in dict.fromkeys(wanted.values()) if name != HIDDEN]
        after, *values = half.session.run([SUM, *outputs], feeds)
        found = {HIDDEN: feeds[HIDDEN], **dict(zip(outputs, values, strict=True))}
        return after, {linear: found[value] for linear, value in wanted.items()}

    def _experts(self, half: HalfLayer, index: int, feeds: Mapping[str, Any], weights_of: WeightsOf) -> Captured:
        """Hidden states after experts, and the inputs of router, shared expert and selected experts."""
        config, layer = self.config, layer_layout(self.config, index)
        assert config.experts is not None and layer.router is not None  # noqa: S101, PT018 -- half() has checked it
        hidden, (outputs, inputs) = feeds[HIDDEN], self._run(half, index, feeds, capture=True)
        scores, shared = np.split(outputs.reshape(-1, outputs.shape[-1]), [config.experts.count], axis=-1)
        gate_up, down = ((linear, weights_of(linear), self._biases(linear)) for linear in (layer.gate_up, layer.down))
        normed = inputs[layer.router.name].reshape(-1, config.hidden_size)
        output, routed = run_experts(config.experts, gate_up, down, normed, scores)
        if layer.shared is not None:
            output = output + shared
        if layer.after_mlp is not None:
            weight = self._vector(Vector((layer.after_mlp.weight,), float(config.traits.norms_add_one)))
            output = (rms_norm(output.astype(np.float64), config.norm_epsilon) * weight).astype(np.float32)
        after = hidden + np.float32(config.residual_scale) * output.reshape(hidden.shape)
        return after, inputs, routed

    def _biases(self, linear: FusedLinear) -> Float32Array | None:
        """The biases of all experts of a linear, float32 [N]; None for a linear without."""
        if not linear.biased:
            return None
        return np.concatenate([self.source.read(name).reshape(-1) for name in linear.biases])

    def _mixer_feeds(self, half: HalfLayer, index: int, batch: Batch) -> dict[str, npt.NDArray[Any]]:
        rows, slots = batch.tokens.shape
        layer = layer_layout(self.config, index)
        if layer.states is not None:
            feeds = self._states(half, layer.states, batch)
        else:
            empty = np.zeros((rows, self.config.kv_heads, 0, self.config.head_dim), np.float32)
            feeds = {
                "position_ids": batch.positions,
                "attention_bias": batch.bias(self.config.attention[index].window),
                "seqlens_k": np.full(rows, slots - 1, np.int32),
                "total_sequence_length": np.array(slots, np.int32),
                **dict.fromkeys(inputs_outputs.past_cache(half.layer), empty),
            }
        return {name: value for name, value in feeds.items() if name in half.inputs}

    def _states(self, half: HalfLayer, states: StateWeights, batch: Batch) -> dict[str, npt.NDArray[Any]]:
        """Empty states, and where texts begin."""
        rows, config, feeds = len(batch.tokens), states.config, {}
        if isinstance(config, RecurrentConfig):
            matrix = (rows, config.value_heads, config.key_dim, config.value_dim)
            feeds = {
                inputs_outputs.past_recurrent(half.layer): np.zeros(matrix, np.float32),
                inputs_outputs.past_updates(half.layer): np.zeros((rows, 0, config.update_width), np.float32),
                TEXT_STARTS: batch.text_starts(),
            }
        before = np.zeros((rows, config.kernel - 1, states.channels), np.float32)
        masks = {within_text(back): batch.within_text(back) for back in range(1, config.kernel)}
        return {inputs_outputs.past_conv(half.layer): before, **masks, **feeds}

    def _vector(self, vector: Vector) -> Float32Array:
        """The value of a vector input."""
        if vector not in self._vectors:
            tensors = [self.source.read(name) for name in vector.sources]
            parts = [each if vector.tap is None else each[:, 0, vector.tap] for each in tensors]
            self._vectors[vector] = np.concatenate(parts) + np.float32(vector.plus)
        return self._vectors[vector]


def norm_model(config: DecoderConfig) -> ModelProto:
    """The final norm, and the scale of the logits, applied to the head's inputs as in `graph.decoder_parts`."""
    factor = config.logits_scale / (config.logits_softcap or 1.0)
    return parsed_model(f"""norm (float[r, h] {HIDDEN}, float[h] norm) => (float[r, h] normed)
    <float scale = {{{factor!r}}}>
    {{
        unscaled = SimplifiedLayerNormalization
            <axis = -1, epsilon = {float(config.norm_epsilon)!r}, stash_type = 1> ({HIDDEN}, norm)
        normed = Mul(unscaled, scale)
    }}""")


def head_model(config: DecoderConfig) -> ModelProto:
    """Product and soft cap of the logits, as in `graph.decoder_parts`."""
    cap = config.logits_softcap
    bounded = "" if cap is None else "bounded = Tanh(product) logits = Mul(bounded, cap)"
    return parsed_model(f"""head (float[r, h] inputs, float[v, h] head) => (float[r, v] logits)
    <float cap = {{{float(cap or 1.0)!r}}}>
    {{
        {"logits" if cap is None else "product"} = Gemm <transB = 1> (inputs, head) {bounded}
    }}""")
