"""The float model layer by layer in ONNX Runtime, its matrices fed in for each pass.

Weights of one unit at a time need to be in memory, and any of them can be replaced by rounded ones. Texts go through
in batches (`packing`).
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

from ...errors import InputError
from ..check.contract_session import ModelSession
from ..checkpoint.config import DecoderConfig, LayerAttention
from ..checkpoint.layout import FusedLinear, embedding_layout, final_norm, head_layout, layer_layout
from ..checkpoint.source import Float32Array, ModelSource, RowRange
from ..graph import inputs_outputs
from ..graph.decoder import IR_VERSION, OPSET
from ..graph.nodes import MICROSOFT
from .layer_graphs import HIDDEN, HalfLayer, attention_half, feed_forward_half
from .text_packing import Batch

WeightsOf = Callable[[FusedLinear], Float32Array]
"""The matrix [N, K] of a unit."""

AT_ONCE: Final = 2
"""How many passes may run beside each other: two that share the cores are faster than one that has them all."""
LOGITS_OF_PASS: Final = 1 << 24
"""About how many logits are in memory at a time."""


@dataclass(frozen=True)
class _Half:
    """A loaded half of a layer, and the number of the layer it was built for."""

    graph: HalfLayer
    session: ModelSession
    index: int


class LayerRunner:
    """Runs a decoder of plain linears a half layer at a time; hidden states are float32 [B, S, hidden]."""

    def __init__(self, source: ModelSource, config: DecoderConfig, context: int) -> None:
        """`context` is the positions that the exported graph will serve; some rotations depend on it.

        Raises:
            InputError: the model has experts.
        """
        if config.experts is not None:
            raise InputError(
                "models with experts cannot be calibrated", "choose a method that needs no text: rtn, k-quant or hqq"
            )
        self.source = source
        self.config = config
        self._context = context
        self._attention: dict[LayerAttention, _Half] = {}
        self._feed_forward: _Half | None = None
        self._norm = _session(_norm_graph(config))
        self._head = _session(_head_graph(config))
        self._vectors: dict[tuple[tuple[str, ...], float], Float32Array] = {}

    def matrix(self, linear: FusedLinear) -> Float32Array:
        """A unit's matrix as the checkpoint has it, float32 [N, K].

        Raises:
            CheckpointError: it cannot be read.
        """
        matrix, row = np.empty(linear.shape, np.float32), 0
        for name in linear.weights:
            for piece in self.source.chunks(name):
                matrix[row : row + len(piece)] = piece
                row += len(piece)
        return matrix

    def embed(self, batch: Batch, matrix: Float32Array | None = None) -> Float32Array:
        """What goes into the first layer; `matrix` takes the place of the embedding's own."""
        if matrix is None:
            name = embedding_layout(self.config).weights[0]
            ids, where = np.unique(batch.tokens, return_inverse=True)
            rows = [self.source.read_rows(RowRange(name, token, token + 1)) for token in ids.tolist()]
            hidden = np.concatenate(rows)[where.reshape(batch.tokens.shape)]
        else:
            hidden = matrix[batch.tokens]
        return np.asarray(hidden * np.float32(self.config.embedding_scale), np.float32)

    def attention(self, index: int, hidden: Float32Array, batch: Batch, weights_of: WeightsOf) -> Float32Array:
        """The residual after the attention of layer `index`."""
        half = self._attention_half(index)
        return self._run(half, index, hidden, weights_of, self._attention_feeds(half, index, batch), [])[0]

    def feed_forward(self, index: int, hidden: Float32Array, weights_of: WeightsOf) -> Float32Array:
        """The residual after the feed-forward of layer `index`."""
        return self._run(self._feed_forward_half(), index, hidden, weights_of, {}, [])[0]

    def layer(self, index: int, hidden: Float32Array, batch: Batch, weights_of: WeightsOf) -> Float32Array:
        """The residual after layer `index`."""
        return self.feed_forward(index, self.attention(index, hidden, batch, weights_of), weights_of)

    def captured(
        self, index: int, hidden: Float32Array, batch: Batch, weights_of: WeightsOf
    ) -> tuple[Float32Array, dict[str, Float32Array]]:
        """The residual after layer `index`, and by the name of a unit what it multiplies, float32 [B, S, K]."""
        middle, first = self.attention_captured(index, hidden, batch, weights_of)
        after, second = self.feed_forward_captured(index, middle, weights_of)
        return after, {**first, **second}

    def attention_captured(
        self, index: int, hidden: Float32Array, batch: Batch, weights_of: WeightsOf
    ) -> tuple[Float32Array, dict[str, Float32Array]]:
        """`attention`, and what its units multiply, as of `captured`."""
        half = self._attention_half(index)
        return self._captured(half, index, hidden, weights_of, self._attention_feeds(half, index, batch))

    def feed_forward_captured(
        self, index: int, hidden: Float32Array, weights_of: WeightsOf
    ) -> tuple[Float32Array, dict[str, Float32Array]]:
        """`feed_forward`, and what its units multiply, as of `captured`."""
        return self._captured(self._feed_forward_half(), index, hidden, weights_of, {})

    def head_inputs(self, rows: Float32Array) -> Float32Array:
        """What the head multiplies, of rows [R, hidden] after the last layer."""
        norm = final_norm(self.config)
        weight = self._vector((norm.weight,), float(self.config.traits.norms_add_one))
        return self._norm.run(["normed"], {HIDDEN: rows, "norm": weight})[0]

    def logits(self, rows: Float32Array, weights_of: WeightsOf) -> Float32Array:
        """Logits [R, vocabulary] of rows [R, hidden] after the last layer; they are all in memory at once."""
        matrix = weights_of(head_layout(self.config))
        return self._head.run(["logits"], {"rows": self.head_inputs(rows), "head": matrix})[0]

    @property
    def rows_of_pass(self) -> int:
        """How many rows' logits to ask for at once."""
        return max(1, LOGITS_OF_PASS // self.config.vocab_size)

    def _captured(
        self, half: _Half, index: int, hidden: Float32Array, weights_of: WeightsOf, feeds: Mapping[str, Any]
    ) -> tuple[Float32Array, dict[str, Float32Array]]:
        wanted = [name for name in dict.fromkeys(half.graph.captured.values()) if name != HIDDEN]
        after, *values = self._run(half, index, hidden, weights_of, feeds, wanted)
        found = {HIDDEN: hidden, **dict(zip(wanted, values, strict=True))}
        names = {linear.name: _of_layer(linear.name, half.index, index) for linear in half.graph.matrices.values()}
        return after, {names[linear]: found[value] for linear, value in half.graph.captured.items()}

    def _run(
        self,
        half: _Half,
        index: int,
        hidden: Float32Array,
        weights_of: WeightsOf,
        feeds: Mapping[str, Any],
        wanted: list[str],
    ) -> list[Float32Array]:
        linears = {linear.name: linear for linear in layer_layout(self.config, index).linears}
        matrices = {
            name: weights_of(linears[_of_layer(linear.name, half.index, index)])
            for name, linear in half.graph.matrices.items()
        }
        vectors = {
            name: self._vector(tuple(_of_layer(each, half.index, index) for each in vector.sources), vector.plus)
            for name, vector in half.graph.vectors.items()
        }
        return half.session.run([half.graph.output, *wanted], {HIDDEN: hidden, **matrices, **vectors, **feeds})

    def _attention_half(self, index: int) -> _Half:
        kind = self.config.attention[index]
        if kind not in self._attention:
            graph = attention_half(self.config, index, self._context)
            self._attention[kind] = _Half(graph, _session(graph.model), index)
        return self._attention[kind]

    def _feed_forward_half(self) -> _Half:
        if self._feed_forward is None:
            graph = feed_forward_half(self.config, 0)
            self._feed_forward = _Half(graph, _session(graph.model), 0)
        return self._feed_forward

    def _attention_feeds(self, half: _Half, index: int, batch: Batch) -> dict[str, npt.NDArray[Any]]:
        rows, slots = batch.tokens.shape
        nothing = np.zeros((rows, self.config.kv_heads, 0, self.config.head_dim), np.float32)
        feeds: dict[str, npt.NDArray[Any]] = {
            "position_ids": batch.positions,
            "attention_bias": batch.bias(self.config.attention[index].window),
            "seqlens_k": np.full(rows, slots - 1, np.int32),
            "total_sequence_length": np.array(slots, np.int32),
            inputs_outputs.past_key(half.index): nothing,
            inputs_outputs.past_value(half.index): nothing,
        }
        taken = {port.name for port in half.graph.model.graph.input}
        return {name: value for name, value in feeds.items() if name in taken}

    def _vector(self, sources: tuple[str, ...], plus: float) -> Float32Array:
        if (sources, plus) not in self._vectors:
            value = np.concatenate([self.source.read(name) for name in sources])
            self._vectors[sources, plus] = value + np.float32(plus)
        return self._vectors[sources, plus]


def _session(model: ModelProto) -> ModelSession:
    return ModelSession(model, Path(), max(1, (os.cpu_count() or 1) // AT_ONCE))


def _of_layer(name: str, built_for: int, index: int) -> str:
    """A name of a unit or tensor of one layer as it is in another."""
    return name.replace(f"layers.{built_for}.", f"layers.{index}.", 1)


def _norm_graph(config: DecoderConfig) -> ModelProto:
    """The final norm, and the scale of the logits, which the head's inputs take as in `vocabulary`."""
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
    """Product and cap of the logits, as in `vocabulary`."""
    cap = config.logits_softcap
    product = helper.make_node("Gemm", ["rows", "head"], ["logits" if cap is None else "product"], transB=1)
    if cap is None:
        return _model([product], {"rows": 2, "head": 2}, "logits", {})
    bounded = helper.make_node("Tanh", ["product"], ["bounded"])
    capped = helper.make_node("Mul", ["bounded", "cap"], ["logits"])
    return _model([product, bounded, capped], {"rows": 2, "head": 2}, "logits", {"cap": cap})


def _model(nodes: list[NodeProto], inputs: Mapping[str, int], output: str, scalars: Mapping[str, float]) -> ModelProto:
    """A graph of float32 inputs, given with their ranks, and one output of rank 2."""
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
