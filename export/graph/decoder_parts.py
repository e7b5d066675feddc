"""The parts of the decoder in the graph: embedding, attention on the caller's KV cache, feed-forward, LM head.

Attention is one GroupQueryAttention per layer; the feed-forward is dense or by experts.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from onnx import GraphProto, TensorProto

from ..checkpoint.config import SILU, ExpertsConfig, LayerAttention
from ..checkpoint.layer_weights import FusedLinear, Layer, Norm, SharedExpertWeights
from ..checkpoint.layout import embedding_layout, head_layout
from ..checkpoint.rope import Rope
from . import inputs_outputs
from .initializers import StoredMatrix
from .inputs_outputs import past_cache, present_cache
from .nodes import INT8_ACTIVATIONS, MICROSOFT, Nodes, gather_settings

_ROTARY_MULTIPLE: Final = 16
"""GroupQueryAttention can only rotate if head size and rotated channels are multiples of this; otherwise a
RotaryEmbedding node precedes it."""
_MASKED: Final = -1e9


class Attention:
    """Appends the attention of each layer; layers share rotary tables and window masks."""

    def __init__(self, nodes: Nodes, context: int) -> None:
        """`context` is the number of positions in the rotary tables."""
        self._nodes = nodes
        self._tables: dict[tuple[Rope, int], tuple[str, str]] = {}
        """Names of cosines and sines by rotary embedding and number of rotated channels."""
        self._biases: dict[int, str] = {}
        config = nodes.config
        rotations = [(layer.rope, layer.rotated_channels) for layer in config.attention if layer.rope is not None]
        for rope, channels in dict.fromkeys(rotations):
            name = f"rope.{len(self._tables)}" if self._tables else "rope"
            cosines, sines = rope.table(channels, context)
            self._tables[rope, channels] = (
                nodes.weights.constant(f"{name}.cos", cosines),
                nodes.weights.constant(f"{name}.sin", sines),
            )
        self._query_scales: str | None = None
        """The factors of the M new tokens' queries, [1, M, 1]; None if all are 1 within the context."""
        scaling = config.query_scaling
        if scaling is not None and context > scaling.original_positions:
            factors = nodes.weights.constant("query.factors", scaling.table(context))
            self._query_scales = nodes.add("Gather", [factors, "position_ids"], "query.scales", axis=0)

    def append(self, index: int, layer: Layer, normed: str) -> str:
        """Append layer `index` without its output projection; returns the name of [1, M, heads * head_dim]."""
        nodes, config, name = self._nodes, self._nodes.config, f"layers.{index}"
        settings = config.attention[index]
        table = None if settings.rope is None else self._tables[settings.rope, settings.rotated_channels]
        channels = (settings.head_dim, settings.rotated_channels)
        inside = None if any(each % _ROTARY_MULTIPLE for each in channels) else table
        query, key, value, gate = nodes.linear(layer.qkv, normed), "", "", ""
        if settings.owner is not None:
            # Without new keys and values, the operator reads those that the owner's operator has just completed.
            key = value = nodes.constant(
                f"no_slots.{settings.kv_width}", np.zeros((1, 0, settings.kv_width), np.float32)
            )
        elif settings.keys_as_values:
            query, key = nodes.split(query, [f"{name}.query", f"{name}.key"], self._widths(settings, 2))
            value = key
        elif config.traits.gated_attention:
            query, key, value, gate = self._split_gate(query, name)
        elif layer.query_norm is not None or table is not inside or self._query_scales is not None:
            parts = [f"{name}.query", f"{name}.key", f"{name}.value"]
            query, key, value = nodes.split(query, parts, self._widths(settings, 3))
        if config.traits.value_norm and settings.owner is None:
            value = self._norm_heads(value, None, settings.head_dim, f"{name}.value")
        if layer.query_norm is not None:
            query = self._norm_heads(query, layer.query_norm, settings.head_dim, query)
        if layer.key_norm is not None:
            key = self._norm_heads(key, layer.key_norm, settings.head_dim, key)
        if table is not None and inside is None:
            query = self._rotate(query, config.heads, table, settings)
            key = key if settings.owner is not None else self._rotate(key, settings.kv_heads, table, settings)
        if self._query_scales is not None:
            query = nodes.add("Mul", [query, self._query_scales], f"{name}.query.scaled")
        rotary = ["", "", ""] if inside is None else [*inside, "position_ids"]
        bias = "attention_bias" if settings.window is None else self._window_bias(settings.window)
        attended, cache = f"{name}.attended", past_cache(index)
        present: tuple[str, ...] = present_cache(index)
        if settings.owner is not None:
            cache, present = present_cache(settings.owner), ()  # an output would be a copy of the cache
        sinks = [] if layer.sinks is None else [nodes.weights.vector(f"{name}.sinks", [layer.sinks])]
        # Tokens of a block attend to each other: the bias alone says who attends to whom.
        causal = None if config.blocks is None else 0
        scores = {"scale": config.attention_scale, "softcap": config.attention_softcap, "causal": causal}
        nodes.add_multi_output(
            "GroupQueryAttention",
            [query, key, value, *cache, "seqlens_k", "total_sequence_length", *rotary, bias, *sinks],
            [attended, *present],
            attended,
            MICROSOFT,
            num_heads=config.heads,
            kv_num_heads=settings.kv_heads,
            do_rotary=int(inside is not None),
            **{name: value for name, value in scores.items() if value is not None},
        )
        if not gate:
            return attended
        return nodes.add("Mul", [attended, nodes.add("Sigmoid", [gate], f"{gate}.open")], f"{name}.attended.gated")

    def _split_gate(self, both: str, name: str) -> list[str]:
        """Append queries, keys, values and the gate of attention's output, which follows the query in every head."""
        nodes, config = self._nodes, self._nodes.config
        widths = nodes.integers("heads.widths", 2 * config.query_width, config.kv_width, config.kv_width)
        both, key, value = nodes.split(both, [f"{name}.query.gate", f"{name}.key", f"{name}.value"], widths)
        apart = nodes.integers("heads.gated", 0, 0, config.heads, 2 * config.head_dim)
        split = nodes.add("Reshape", [both, apart], f"{both}.apart")
        widths = nodes.integers("heads.halves", config.head_dim, config.head_dim)
        halves = nodes.split(split, [f"{name}.query.half", f"{name}.output_gate.half"], widths)
        query, gate = nodes.together(halves[0], f"{name}.query"), nodes.together(halves[1], f"{name}.output_gate")
        return [query, key, value, gate]

    def _widths(self, settings: LayerAttention, parts: int) -> str:
        config = self._nodes.config
        widths = (config.heads * settings.head_dim, settings.kv_width, settings.kv_width)[:parts]
        usual = widths == (config.query_width, config.kv_width, config.kv_width)
        name = "heads.widths" if usual else ".".join(["heads.widths", *map(str, widths)])
        return self._nodes.integers(name, *widths)

    def _norm_heads(self, heads: str, norm: Norm | None, head_dim: int, name: str) -> str:
        """Append the RMS norm of queries, keys or values (without weights where `norm` is None).

        The CPU GroupQueryAttention does not support its own norm inputs.
        """
        nodes = self._nodes
        if norm is not None and nodes.config.traits.head_norm == "whole":
            return nodes.norm(heads, norm, f"{name}.normed")
        usual = head_dim == nodes.config.head_dim
        apart = nodes.integers("heads.apart" if usual else f"heads.apart.{head_dim}", 0, 0, -1, head_dim)
        together = nodes.integers("heads.together", 0, 0, -1)
        split, output = nodes.add("Reshape", [heads, apart], f"{name}.apart"), f"{name}.normed"
        normed = nodes.unweighted_norm(split, head_dim, output) if norm is None else nodes.norm(split, norm, output)
        return nodes.add("Reshape", [normed, together], f"{name}.together")

    def _rotate(self, heads: str, count: int, table: tuple[str, str], settings: LayerAttention) -> str:
        whole = settings.rotated_channels == settings.head_dim
        part: dict[str, Any] = {} if whole else {"rotary_embedding_dim": settings.rotated_channels}
        inputs = [heads, "position_ids", *table]
        return self._nodes.add("RotaryEmbedding", inputs, f"{heads}.rotated", MICROSOFT, num_heads=count, **part)

    def _window_bias(self, window: int) -> str:
        """Append the caller's bias with all tokens masked that are at least `window` positions back, [1, 1, M, T].

        The operator's own window (`local_window_size`) counts slots. In a token tree the slot of a token is further on
        than its position, so that window would end too early. It is not faster on CPU either.
        """
        nodes, name = self._nodes, f"window.{window}"
        if not self._biases:
            # Distances in positions from the M new tokens back to all T tokens, int64 [M, T]. The position of a cached
            # token is its slot; the positions of the new tokens are an input.
            zero, one = (nodes.constant(f"window.{name}", np.array(value)) for name, value in (("zero", 0), ("one", 1)))
            first, last = nodes.integers("window.first", 0), nodes.integers("window.last", -1)
            new = nodes.add("Squeeze", ["position_ids", first], "window.new")
            new_tokens = nodes.add("Size", [new], "window.rows")
            total = nodes.add("Cast", ["total_sequence_length"], "window.total", to=TensorProto.INT64)
            cached = nodes.add("Sub", [total, new_tokens], "window.cached")
            slots = nodes.add("Range", [zero, cached, one], "window.slots")
            keys = nodes.add("Concat", [slots, new], "window.keys", axis=0)
            queries = nodes.add("Unsqueeze", [new, last], "window.queries")
            nodes.add("Sub", [queries, keys], "window.distances")
        if window not in self._biases:
            width = nodes.integers(f"{name}.width", window)
            far = nodes.add("GreaterOrEqual", ["window.distances", width], f"{name}.far")
            masked = nodes.scalar("window.masked", _MASKED)
            self._biases[window] = nodes.add("Where", [far, masked, "attention_bias"], f"{name}.bias")
        return self._biases[window]


EXPERTS_NODE: Final = "experts"
"""Last part of the name of the operator that runs experts."""
_INTERLEAVED: Final = 1
"""Alternating rows of gate and up, the only order that the CPU operators support."""


def append_feed_forward(nodes: Nodes, index: int, layer: Layer, normed: str) -> str:
    """Append the feed-forward of layer `index`, down(activation(gate) * up); returns the name of [1, M, hidden]."""
    name = f"layers.{index}"
    if layer.router is None or nodes.config.experts is None:
        return append_dense(nodes, name, layer.gate_up, layer.down, normed)
    output = _append_experts(nodes, name, layer, layer.router, nodes.config.experts, normed)
    if layer.shared is None:
        return output
    return nodes.add("Add", [output, append_shared_expert(nodes, index, layer.shared, normed)], f"{name}.all_experts")


def append_shared_expert(nodes: Nodes, index: int, shared: SharedExpertWeights, normed: str) -> str:
    """Append the feed-forward that all tokens of layer `index` run through; returns the name of [1, M, hidden]."""
    name = f"layers.{index}.shared_expert"
    output = append_dense(nodes, name, shared.gate_up, shared.down, normed)
    if shared.gate is None:
        return output
    share = nodes.add("Sigmoid", [nodes.linear(shared.gate, normed)], f"{name}.share")
    return nodes.add("Mul", [output, share], f"{name}.output")


def append_dense(nodes: Nodes, name: str, gate_up: FusedLinear, down: FusedLinear, normed: str) -> str:
    """Append a dense feed-forward; returns the name of [1, M, hidden]."""
    both, width = nodes.linear(gate_up, normed), down.columns
    widths = "mlp.widths" if width == nodes.config.intermediate_size else f"mlp.widths.{width}"
    gate, up = nodes.split(both, [f"{name}.gate", f"{name}.up"], nodes.integers(widths, width, width))
    return nodes.linear(down, nodes.add("Mul", [activated(nodes, name, gate), up], f"{name}.gated"))


def activated(nodes: Nodes, name: str, gate: str) -> str:
    """Append the model's activation function."""
    if nodes.config.activation == SILU:
        return nodes.silu(gate, f"{name}.silu")
    return nodes.add("Gelu", [gate], f"{name}.gelu", approximate="tanh")


def _append_experts(
    nodes: Nodes, name: str, layer: Layer, router: FusedLinear, experts: ExpertsConfig, normed: str
) -> str:
    """Append one operator that runs only the selected experts: QMoE at accuracy level 4, or MoE in float32."""
    scores = nodes.linear(router, normed)
    flat = nodes.add("Reshape", [scores, nodes.integers("router.flat", -1, experts.count)], f"{name}.scores")
    first, second = _stack(nodes, layer.gate_up), _stack(nodes, layer.down)
    weight_format = nodes.plan[layer.gate_up.name]
    attributes: dict[str, Any] = {
        "k": experts.top_k,
        "activation_type": "swiglu",  # gate * sigmoid(alpha * gate) * (up + beta)
        "activation_alpha": experts.alpha,
        "activation_beta": experts.up_offset,
        "swiglu_fusion": _INTERLEAVED,
        "normalize_routing_weights": 1,
        **({} if experts.limit is None else {"swiglu_limit": experts.limit}),
    }
    operator, inputs = "QMoE", [normed, flat, *first, *second]
    if weight_format.bits == 32:
        operator, inputs = "MoE", [normed, flat, first[0], first[2], second[0], second[2]]
    else:
        attributes |= {
            "expert_weight_bits": weight_format.bits,
            "block_size": weight_format.block,
            "accuracy_level": INT8_ACTIVATIONS,
            "weights_prepacked": 0,
        }
    while not inputs[-1]:
        inputs.pop()
    output = nodes.add(operator, inputs, f"{name}.{EXPERTS_NODE}", domain=MICROSOFT, **attributes)
    return output if experts.normalized else _weighted_by_shares(nodes, name, experts, scores, output)


def _stack(nodes: Nodes, linear: FusedLinear) -> tuple[str, str, str]:
    """Add the experts of a linear; returns the names of weights or codes, scales and biases, "" for absent ones."""
    codes, scales = nodes.weights.experts(linear, nodes.plan[linear.name])
    return codes, scales, nodes.weights.vector(f"{linear.name}.bias", linear.biases) if linear.biased else ""


def _weighted_by_shares(nodes: Nodes, name: str, experts: ExpertsConfig, scores: str, output: str) -> str:
    """Multiply the output of the selected experts by their total probability among all experts.

    The operators have an option for it (`normalize_routing_weights=0`), which does not work on CPU: QMoE normalizes
    nevertheless, and MoE clears its output before it reads the input, which may share its memory.
    """
    shares = nodes.add("Softmax", [scores], f"{name}.shares", axis=-1)
    chosen = [f"{name}.chosen", f"{name}.which"]
    nodes.add_multi_output("TopK", [shares, nodes.integers("router.chosen", experts.top_k)], chosen, chosen[0])
    total = nodes.add("ReduceSum", [chosen[0], nodes.integers("router.axis", -1)], f"{name}.total", keepdims=1)
    return nodes.add("Mul", [output, total], f"{name}.shared")


HEAD_INPUT: Final = "head.rows"
"""Name of the normed hidden states [R, hidden] that the LM head reads."""
_EMBEDDED: Final = ("embedded", "embedded.joined")
"""Names of the value with the embeddings: the second where blocks divide the hidden size and nothing is cut off."""


def embedded_value(graph: GraphProto) -> str | None:
    """Name of the embeddings [1, M, hidden] in an exported graph, before any scaling; None in other graphs."""
    given = {name for node in graph.node for name in node.output}
    return next((name for name in _EMBEDDED if name in given), None)


def append_embedding(nodes: Nodes) -> tuple[str, StoredMatrix]:
    """Append the embedding of the tokens, scaled.

    Returns:
        The name of [1, M, hidden], and the matrix for a tied head: codes with scales, or float32 weights alone.
    """
    config = nodes.config
    head = head_layout(config).name if config.tied_head else ""
    embedded, matrix = gathered_rows(nodes, embedding_layout(config), "embedded", head)
    # The scale is a separate node because the head may share the matrix.
    return nodes.scaled(embedded, config.embedding_scale, "embedding.scale", "embedded.scaled"), matrix


def append_head(nodes: Nodes, normed: str, embedding: StoredMatrix) -> str:
    """Append the logits [R, vocabulary] of normed hidden states [1, R, hidden]; returns the name of [R, hidden].

    `embedding` is the matrix of a tied head, from `append_embedding`.
    """
    config, linear = nodes.config, head_layout(nodes.config)
    rows = nodes.add("Squeeze", [normed, nodes.integers("head.axes", 0)], HEAD_INPUT)
    cap = config.logits_softcap
    # Scaling the hidden states instead of the logits is cheaper. It differs only by float rounding, and not at all
    # for Granite's powers of two.
    hidden = nodes.scaled(rows, config.logits_scale / (cap or 1.0), "head.scale", "head.scaled")
    output = inputs_outputs.LOGITS if cap is None else "head.product"
    append_product(nodes, linear, hidden, output, embedding if config.tied_head else None)
    if cap is not None:
        capped = nodes.add("Tanh", [output], "head.tanh")
        nodes.add("Mul", [capped, nodes.scalar("head.cap", cap)], inputs_outputs.LOGITS)
    return rows


def append_product(
    nodes: Nodes, linear: FusedLinear, hidden: str, output: str, stored: StoredMatrix | None = None
) -> None:
    """Append the logits `output` of hidden states [R, hidden]; `stored` is the LM head's matrix if the graph has it."""
    weight_format = nodes.plan[linear.name]
    if weight_format.bits == 32:
        nodes.add("Gemm", [hidden, stored.codes if stored else nodes.weights.float32(linear)], output, transB=1)
    else:
        stored = stored or nodes.weights.quantized(linear, weight_format)
        nodes.matmul_nbits(linear.shape, weight_format, [hidden, *stored.inputs()], output)


def gathered_rows(nodes: Nodes, linear: FusedLinear, output: str, head: str = "") -> tuple[str, StoredMatrix]:
    """Append the rows of the tokens of an embedding.

    Args:
        nodes: the graph.
        linear: the embedding.
        output: name of the result, and beginning of the names of what leads to it.
        head: name of an LM head that shares the matrix; empty for none.

    Returns:
        The name of [1, M, columns], and the initializers of the head: float32 weights alone, or as
        `Initializers.gathered` returns them.
    """
    weight_format, columns = nodes.plan[linear.name], linear.columns
    if weight_format.bits == 32:
        weights = nodes.weights.float32(linear)
        return nodes.add("Gather", [weights, "input_ids"], output, axis=0), StoredMatrix(weights, "")
    stored, table = nodes.weights.gathered(linear, weight_format, head)
    points = [stored.zero_points] if stored.zero_points else []
    inputs = [stored.codes, "input_ids", stored.scales, *points]
    gathered = nodes.add("GatherBlockQuantized", inputs, f"{output}.blocks", **gather_settings(weight_format))
    joined = nodes.add("Reshape", [gathered, nodes.integers(f"{output}.shape", 0, 0, -1)], f"{output}.joined")
    if columns % weight_format.block == 0:
        return joined, table
    bounds = [
        nodes.integers(f"{output}.starts", 0),
        nodes.integers(f"{output}.ends", columns),
        nodes.integers(f"{output}.axes", 2),
    ]
    return nodes.add("Slice", [joined, *bounds], output), table
