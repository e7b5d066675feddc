"""Writes the tiny llama as an ONNX graph in any `Layout`, node by node as exporters do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from support.layout_kinds import (
    CONTEXT,
    HEAD_DIM,
    HEADS,
    LAYERS,
    VOCABULARY,
    Attention,
    Cache,
    CacheType,
    Embedding,
    Layout,
    LogitOutput,
    Mask,
    Positions,
)
from support.layout_reference import INT8_SCALE
from support.layout_states import state_layers, state_values, write_mixer
from support.small_graphs import Nodes

_CACHE_TYPES: Final = {
    CacheType.FLOAT32: TensorProto.FLOAT,
    CacheType.FLOAT16: TensorProto.FLOAT16,
    CacheType.INT8: TensorProto.INT8,
}


class LayoutWriter:
    """Builds the graphs of one layout."""

    def __init__(self, layout: Layout, weights: Mapping[str, npt.NDArray[np.float32]]) -> None:
        self.layout = layout
        self.weights = weights
        self.integer_type = TensorProto.INT32 if layout.int32_ids else TensorProto.INT64

    def model(self, *, cached: bool = True, merged: bool = False) -> onnx.ModelProto:
        """Build the graph: with cache inputs, without them, or merged: both as branches of an `If`."""
        nodes = Nodes(self.layout.opset)
        inputs = self._inputs(cached=cached)
        outputs = self._outputs()
        if merged:
            flag = self.layout.name_of("use_cache_branch")
            inputs.append(helper.make_tensor_value_info(flag, TensorProto.BOOL, [1]))
            branches = {}
            for name, with_past in (("then_branch", True), ("else_branch", False)):
                inner = nodes.inner(f"{name}/")
                output_names = {value.name: f"{name}/{value.name}" for value in outputs}
                _Pass(self.layout, self.weights, inner, output_names, with_past).write()
                renamed = [self._renamed(value, output_names[value.name]) for value in outputs]
                branches[name] = helper.make_graph(inner.nodes, name, [], renamed)
            nodes.op("If", flag, outputs=[value.name for value in outputs], **branches)
        else:
            _Pass(self.layout, self.weights, nodes, {value.name: value.name for value in outputs}, cached).write()
        return nodes.model(inputs, outputs, ir_version=8)

    def embedding(self) -> onnx.ModelProto:
        """Build the graph that makes embeddings of token ids."""
        nodes = Nodes(self.layout.opset)
        shape = ["batch_size", "sequence_length"]
        _Pass(self.layout, self.weights, nodes, {}, cached=False).embedded("input_ids", ["inputs_embeds"])
        inputs = [helper.make_tensor_value_info("input_ids", self.integer_type, shape)]
        outputs = [helper.make_tensor_value_info("inputs_embeds", TensorProto.FLOAT, [*shape, HEADS * HEAD_DIM])]
        return nodes.model(inputs, outputs, ir_version=8)

    # Inputs and outputs

    def _inputs(self, *, cached: bool) -> list[onnx.ValueInfoProto]:
        layout = self.layout
        batch = 1 if layout.fixed_batch else "batch_size"
        total = "total_sequence_length" if cached else "sequence_length"
        inputs: list[tuple[str, int, list[int | str]]] = [("input_ids", self.integer_type, [batch, "sequence_length"])]
        if layout.embedding is Embedding.APART:
            inputs = [("inputs_embeds", TensorProto.FLOAT, [batch, "sequence_length", HEADS * HEAD_DIM])]
        if layout.mask in (Mask.TOKENS, Mask.NOT_CAUSAL):
            inputs.append(("attention_mask", self.integer_type, [batch, total]))
        elif layout.mask in (Mask.BIAS, Mask.BOOL_ATTENDED, Mask.BOOL_BLOCKED):
            kind = TensorProto.FLOAT if layout.mask is Mask.BIAS else TensorProto.BOOL
            inputs.append(("attention_mask", kind, [batch, 1, "sequence_length", total]))
        elif layout.mask is Mask.LENGTHS:
            inputs += [("past_seq_len", TensorProto.INT32, [1, 1]), ("total_seq_len", TensorProto.INT32, [1])]
        if layout.positions is not Positions.LENGTH:
            three: list[int | str] = [3] if layout.positions is Positions.THREE else []
            inputs.append(("position_ids", self.integer_type, [*three, batch, "sequence_length"]))
        if layout.logit_output is LogitOutput.LAST_N:
            inputs.append(("num_logits_to_keep", TensorProto.INT64, []))
        values = [helper.make_tensor_value_info(layout.name_of(name), kind, shape) for name, kind, shape in inputs]
        return values + ([*self._cache_values("past"), *state_values(layout, "past")] if cached else [])

    def _outputs(self) -> list[onnx.ValueInfoProto]:
        layout = self.layout
        vocabulary: int | str = "vocab_size" if layout.open_vocabulary else VOCABULARY
        shape: list[int | str] = [1 if layout.fixed_batch else "batch_size", "logit_rows", vocabulary]
        if layout.logit_output is LogitOutput.LAST:
            shape[1] = 1
        elif layout.logit_output is LogitOutput.LAST_FLAT:
            del shape[1]
        kind = TensorProto.FLOAT16 if layout.float16_logits else TensorProto.FLOAT
        logits = helper.make_tensor_value_info(layout.name_of("logits"), kind, shape)
        return [logits, *self._cache_values("present"), *state_values(layout, "present")]

    def _cache_values(self, side: str) -> list[onnx.ValueInfoProto]:
        layout = self.layout
        batch: int | str = 1 if layout.fixed_batch else "batch_size"
        heads: int | str = "num_heads" if layout.open_heads else layout.kv_heads
        dim: int | str = "kv_cache_dim" if layout.open_heads else HEAD_DIM
        values = []
        for layer in range(state_layers(layout), LAYERS):
            slots: int | str = "past_sequence_length" if side == "past" else "total_sequence_length"
            if layout.window_cache and layer % 2 == 1:
                slots = layout.window_slots or "window_length"
            if layout.capacity is not None:
                slots = layout.capacity
            shapes: Mapping[Cache, list[list[int | str]]] = {
                Cache.SPLIT: [[batch, heads, slots, dim]] * 2,
                Cache.NUMBERED: [[batch, heads, slots, dim]] * 2,
                Cache.STACKED: [[2, batch, heads, slots, dim]],
                Cache.JOINED: [[batch, slots, 2 * HEAD_DIM]],
                Cache.KEYS_TRANSPOSED: [[batch, heads, dim, slots], [batch, heads, slots, dim]],
            }
            kind = _CACHE_TYPES[layout.cache_type]
            for name, shape in zip(_cache_names(layout, side, layer), shapes[layout.cache], strict=True):
                values.append(helper.make_tensor_value_info(name, kind, shape))
        return values

    @staticmethod
    def _renamed(value: onnx.ValueInfoProto, name: str) -> onnx.ValueInfoProto:
        copy = onnx.ValueInfoProto()
        copy.CopyFrom(value)
        copy.name = name
        return copy


def _cache_names(layout: Layout, side: str, layer: int) -> list[str]:
    if layout.cache is Cache.STACKED:
        names = [f"{side}_{{}}"]
    elif layout.cache is Cache.NUMBERED:
        names = [f"{side}_keys_{{}}", f"{side}_values_{{}}"]
    else:
        stem = "past_key_values" if side == "past" else "present"
        kinds = ["key_value"] if layout.cache is Cache.JOINED else ["key", "value"]
        names = [f"{stem}.{{}}.{kind}" for kind in kinds]
    return [layout.name_of(name, layer) for name in names]


@dataclass
class _Pass:
    """Writes one pass of the decoder into a graph or a branch."""

    layout: Layout
    weights: Mapping[str, npt.NDArray[np.float32]]
    nodes: Nodes
    output_names: Mapping[str, str]
    cached: bool

    def __post_init__(self) -> None:
        self.fused = self.layout.attention is Attention.FUSED
        self.half = self.layout.cache_type is CacheType.FLOAT16
        self.positions = None if self.layout.positions is Positions.LENGTH else self.layout.name_of("position_ids")
        # Numbers of cached tokens (None without a cache), of new ones and of both, each int64 [1].
        self.past: str | None = None
        self.new = self.total = ""

    def write(self) -> None:
        weights, layout, nodes = self.weights, self.layout, self.nodes
        ids = layout.name_of("input_ids" if layout.embedding is Embedding.INSIDE else "inputs_embeds")
        self._write_shared_values(ids)
        hidden = self.embedded(ids) if layout.embedding is Embedding.INSIDE else ids
        for layer in range(LAYERS):
            name = f"model.layers.{layer}"
            normed = self._norm(hidden, f"{name}.input_layernorm.weight")
            hidden = nodes.op(
                "Add", hidden, self._linear(self._mixed(layer, normed), f"{name}.self_attn.o_proj.weight")
            )
            normed = self._norm(hidden, f"{name}.post_attention_layernorm.weight")
            gate, up = (self._linear(normed, f"{name}.mlp.{part}_proj.weight") for part in ("gate", "up"))
            wide = nodes.op("Mul", nodes.op("Mul", gate, nodes.op("Sigmoid", gate)), up)
            hidden = nodes.op("Add", hidden, self._linear(wide, f"{name}.mlp.down_proj.weight"))
        hidden = self._norm(hidden, "model.norm.weight")
        if layout.logit_output is LogitOutput.LAST_N:
            first = nodes.op("Reshape", nodes.op("Neg", layout.name_of("num_logits_to_keep")), nodes.constant([1]))
            last = nodes.constant([np.iinfo(np.int64).max])
            hidden = nodes.op("Slice", hidden, first, last, nodes.constant([1]))
        elif layout.logit_output is not LogitOutput.ALL:
            index = [-1] if layout.logit_output is LogitOutput.LAST else -1
            hidden = nodes.op("Gather", hidden, nodes.constant(index), axis=1)
        target = [self.output_names[layout.name_of("logits")]]
        if layout.float16_logits:
            logits = self._linear(hidden, "model.embed_tokens.weight")
            nodes.op("Cast", logits, to=TensorProto.FLOAT16, outputs=target)
        else:
            head = nodes.constant(weights["model.embed_tokens.weight"].T, np.float32, "lm_head.transposed")
            nodes.op("MatMul", hidden, head, outputs=target)

    def embedded(self, ids: str, outputs: Sequence[str] = ()) -> str:
        table = self.weights["model.embed_tokens.weight"]
        constant = self.nodes.constant(table, np.float32, "model.embed_tokens.weight")
        return self.nodes.op("Gather", constant, ids, axis=0, outputs=outputs)

    def _norm(self, value: str, name: str) -> str:
        return self.nodes.norm(value, name, self.weights[name], fused=self.fused)

    def _linear(self, value: str, name: str) -> str:
        return self.nodes.linear(value, name, self.weights[name])

    def _casts(self, values: Sequence[str], kind: int) -> list[str]:
        """The values, converted where the cache is in half precision."""
        return [self.nodes.op("Cast", value, to=kind) for value in values] if self.half else list(values)

    def _write_shared_values(self, ids: str) -> None:
        """Write what all layers use."""
        layout, nodes = self.layout, self.nodes
        self.new = self.total = nodes.extent(ids, 1)
        if self.cached and not (self.fused and layout.mask is not Mask.NONE):
            axis = {Cache.STACKED: 3, Cache.JOINED: 1, Cache.KEYS_TRANSPOSED: 3}.get(layout.cache, 2)
            self.past = nodes.extent(_cache_names(layout, "past", state_layers(layout))[0], axis)
            self.total = nodes.op("Add", self.past, self.new)
        angles = np.arange(CONTEXT)[:, None] * 10000.0 ** (-2 * np.arange(HEAD_DIM // 2) / HEAD_DIM)
        if not self.fused:
            self.cosine, self.sine = self._rotations(angles)
            self.bias = self._bias()
            return
        dtype = np.float16 if self.half else np.float32
        self.cosine, self.sine = (nodes.constant(f(angles), dtype, f"{f.__name__}_cache") for f in (np.cos, np.sin))
        self.lengths = self._lengths()
        if layout.bias_inside:
            self.past = nodes.op("Sub", self.total, self.new)
            self.bias = self._bias()

    def _lengths(self) -> tuple[str, str]:
        """`seqlens_k` int32 [1] and `total_sequence_length` int32 of the fused operator; sets `total`."""
        layout, nodes, int32 = self.layout, self.nodes, TensorProto.INT32
        scalar = nodes.constant([], np.int64, "no_dimensions")
        if layout.mask is Mask.LENGTHS:
            before = nodes.op("Reshape", layout.name_of("past_seq_len"), nodes.constant([1]))
            total = layout.name_of("total_seq_len")
            self.total = nodes.op("Cast", total, to=TensorProto.INT64)
            return before, nodes.op("Reshape", total, scalar)
        if layout.mask is Mask.NONE:
            before = nodes.op("Cast", nodes.op("Sub", self.total, nodes.constant([1])), to=int32)
        else:
            mask = nodes.op("Cast", layout.name_of("attention_mask"), to=TensorProto.INT64)
            seen = nodes.op("ReduceSum", mask, nodes.constant([1]), keepdims=0)
            before = nodes.op("Cast", nodes.op("Sub", seen, nodes.constant([1])), to=int32)
            self.total = nodes.extent(mask, 1)
        return before, nodes.op("Cast", nodes.op("Reshape", self.total, scalar), to=int32)

    def _rotations(self, angles: npt.NDArray[np.float64]) -> list[str]:
        """Cosine and sine [batch, 1, new, 16] from tables, gathered by position."""
        nodes, positions = self.nodes, self.positions
        if positions is None:
            counted = nodes.span(self.past or nodes.constant([0]), self.total)
            positions = nodes.op("Unsqueeze", counted, nodes.constant([0]))
        turned = []
        for function in (np.cos, np.sin):
            table = nodes.constant(function(angles), np.float32, f"{function.__name__}_cached")
            values = nodes.op("Gather", table, positions, axis=0)
            if self.layout.positions is Positions.THREE:
                # Sections of the channels belong to time, height and width.
                parts = [f"{nodes.prefix}{function.__name__}_section_{i}" for i in range(3)]
                nodes.op("Split", values, nodes.constant([2, 3, 3]), outputs=parts, axis=-1)
                own = [nodes.op("Gather", part, nodes.constant(i), axis=0) for i, part in enumerate(parts)]
                values = nodes.op("Concat", *own, axis=-1)
            twice = nodes.op("Concat", values, values, axis=-1)
            turned.append(nodes.op("Unsqueeze", twice, nodes.constant([1])))
        return turned

    def _bias(self) -> str:
        """float32 [batch or 1, 1, new or 1, total]: zero where a token is attended to, else a large negative number."""
        layout, nodes = self.layout, self.nodes
        if layout.mask is Mask.BIAS:
            return layout.name_of("attention_mask")
        zero = nodes.constant([0])
        lowest = float(np.finfo(np.float32).min)
        if layout.mask in (Mask.BOOL_ATTENDED, Mask.BOOL_BLOCKED):
            added = (0, lowest) if layout.mask is Mask.BOOL_ATTENDED else (lowest, 0)
            return nodes.op("Where", layout.name_of("attention_mask"), *(nodes.constant(x, np.float32) for x in added))
        seen = []
        if layout.mask is not Mask.NONE and not self.fused:
            mask = nodes.op("Cast", layout.name_of("attention_mask"), to=TensorProto.BOOL)
            seen.append(nodes.op("Unsqueeze", mask, nodes.constant([1, 2])))
        if layout.mask is not Mask.NOT_CAUSAL or self.past is None:
            queries = nodes.op("Unsqueeze", nodes.span(self.past or zero, self.total), nodes.constant([1]))
            keys = nodes.op("Unsqueeze", nodes.span(zero, self.total), zero)
            seen.append(nodes.op("Unsqueeze", nodes.op("LessOrEqual", keys, queries), nodes.constant([0, 1])))
        both = seen[0] if len(seen) == 1 else nodes.op("And", *seen)
        dtype = np.float16 if self.fused and self.half else np.float32
        return nodes.op("Where", both, nodes.constant(0, dtype), nodes.constant(float(np.finfo(dtype).min), dtype))

    def _window_bias(self, window: int) -> str:
        """The bias with the slots masked that lie `window` and more before a token."""
        nodes = self.nodes
        queries = nodes.op("Unsqueeze", nodes.span(self.past or nodes.constant([0]), self.total), nodes.constant([1]))
        distance = nodes.op("Sub", queries, nodes.span(nodes.constant([0]), self.total))
        far = nodes.op("Greater", distance, nodes.constant([window - 1]))
        return nodes.op("Where", far, nodes.constant(float(np.finfo(np.float32).min), np.float32), self.bias)

    def _mixed(self, layer: int, normed: str) -> str:
        """What a layer's output projection takes, [batch, new, hidden]."""
        name = f"model.layers.{layer}.self_attn"
        projected = [self._linear(normed, f"{name}.{part}_proj.weight") for part in "qkv"]
        if layer < state_layers(self.layout):
            return write_mixer(self.nodes, self.layout, self.output_names, layer, normed, projected, cached=self.cached)
        return self._fused_attention(layer, projected) if self.fused else self._attention(layer, projected)

    def _fused_attention(self, layer: int, projected: Sequence[str]) -> str:
        layout, nodes = self.layout, self.nodes
        projected = self._casts(projected, TensorProto.FLOAT16)
        inputs = [*projected, *_cache_names(layout, "past", layer), *self.lengths, self.cosine, self.sine]
        attributes: dict[str, Any] = {"num_heads": HEADS, "kv_num_heads": layout.kv_heads, "do_rotary": 1}
        if layout.bias_inside:
            inputs += [self.positions or "", self.bias]
        if layout.window is not None and layer % 2 == 1:
            attributes |= {"local_window_size": layout.window, "sliding_window_cache": int(layout.window_cache)}
        if layout.cache_type is CacheType.INT8:
            scale = nodes.constant([INT8_SCALE], np.float32)
            inputs += [""] * (12 - len(inputs)) + [scale, scale]
            attributes |= {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
        output = f"{nodes.prefix}attended_{layer}"
        outputs = [output, *(self.output_names[name] for name in _cache_names(layout, "present", layer))]
        nodes.op("GroupQueryAttention", *inputs, outputs=outputs, domain="com.microsoft", **attributes)
        return self._casts([output], TensorProto.FLOAT)[0]

    def _attention(self, layer: int, projected: Sequence[str]) -> str:
        nodes = self.nodes
        apart = nodes.constant([0, 0, -1, HEAD_DIM])
        query, key, value = (
            nodes.op("Transpose", nodes.op("Reshape", part, apart), perm=[0, 2, 1, 3]) for part in projected
        )
        query, key = self._rotate(query), self._rotate(key)
        for_heads = []
        for part in self._cached(layer, key, value):
            spread = nodes.op("Unsqueeze", part, nodes.constant([2]))
            shape = nodes.op(
                "Concat",
                nodes.op("Slice", nodes.op("Shape", spread), nodes.constant([0]), nodes.constant([2])),
                nodes.constant([HEADS // self.layout.kv_heads]),
                nodes.op("Slice", nodes.op("Shape", spread), nodes.constant([3]), nodes.constant([5])),
                axis=0,
            )
            wide = nodes.op("Expand", spread, shape)
            for_heads.append(nodes.op("Reshape", wide, nodes.constant([0, HEADS, -1, HEAD_DIM])))
        turned = nodes.op("Transpose", for_heads[0], perm=[0, 1, 3, 2])
        scores = nodes.op("Mul", nodes.op("MatMul", query, turned), nodes.constant(1 / np.sqrt(HEAD_DIM), np.float32))
        windowed = self.layout.window is not None and layer % 2 == 1
        bias = self._window_bias(self.layout.window or 0) if windowed else self.bias
        probs = nodes.op("Softmax", nodes.op("Add", scores, bias), axis=-1)
        attended = nodes.op("Transpose", nodes.op("MatMul", probs, for_heads[1]), perm=[0, 2, 1, 3])
        return nodes.op("Reshape", attended, nodes.constant([0, 0, HEADS * HEAD_DIM]))

    def _cached(self, layer: int, key: str, value: str) -> list[str]:
        """Keys and values of cached and new tokens; also writes the present outputs."""
        nodes, cache = self.nodes, self.layout.cache
        past = _cache_names(self.layout, "past", layer)
        present = [self.output_names[name] for name in _cache_names(self.layout, "present", layer)]
        both = self._casts([key, value], TensorProto.FLOAT16)
        if self.past is not None:
            if cache is Cache.STACKED:
                past = [nodes.op("Gather", past[0], nodes.constant(i), axis=0) for i in (0, 1)]
            elif cache is Cache.JOINED:
                halves = [f"{nodes.prefix}{past[0]}.{kind}" for kind in ("key", "value")]
                nodes.op("Split", past[0], nodes.constant([HEAD_DIM, HEAD_DIM]), outputs=halves, axis=-1)
                past = [nodes.op("Unsqueeze", part, nodes.constant([1])) for part in halves]
            elif cache is Cache.KEYS_TRANSPOSED:
                past[0] = nodes.op("Transpose", past[0], perm=[0, 1, 3, 2])
            both = [nodes.op("Concat", old, now, axis=2) for old, now in zip(past, both, strict=True)]
        if cache is Cache.STACKED:
            nodes.op(
                "Concat", *(nodes.op("Unsqueeze", part, nodes.constant([0])) for part in both), axis=0, outputs=present
            )
        elif cache is Cache.JOINED:
            nodes.op(
                "Concat", *(nodes.op("Squeeze", part, nodes.constant([1])) for part in both), axis=-1, outputs=present
            )
        else:
            if cache is Cache.KEYS_TRANSPOSED:
                nodes.op("Transpose", both[0], perm=[0, 1, 3, 2], outputs=present[:1])
            else:
                nodes.op("Identity", both[0], outputs=present[:1])
            nodes.op("Identity", both[1], outputs=present[1:])
        return self._casts(both, TensorProto.FLOAT)

    def _rotate(self, value: str) -> str:
        nodes = self.nodes
        half, end = nodes.constant([HEAD_DIM // 2]), nodes.constant([HEAD_DIM])
        axis = nodes.constant([3])
        first = nodes.op("Slice", value, nodes.constant([0]), half, axis)
        second = nodes.op("Slice", value, half, end, axis)
        turned = nodes.op("Concat", nodes.op("Neg", second), first, axis=-1)
        return nodes.op("Add", nodes.op("Mul", value, self.cosine), nodes.op("Mul", turned, self.sine))
