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
from support.layout_nodes import Nodes
from support.layout_reference import INT8_SCALE
from support.layout_states import state_layers, state_values, write_mixer

_CACHE_TYPES: Final = {
    CacheType.FLOAT32: TensorProto.FLOAT,
    CacheType.FLOAT16: TensorProto.FLOAT16,
    CacheType.INT8: TensorProto.INT8,
}


@dataclass(frozen=True)
class SharedValues:
    """Names of values that all layers of a pass use."""

    new: str
    """Number of new tokens, int64 [1]."""
    past: str | None
    """Number of cached tokens, int64 [1]; None without a cache."""
    total: str
    """Their sum, int64 [1]."""
    cosine: str
    """[batch, 1, new, 16], or tables [1024, 8] for the fused operator."""
    sine: str
    bias: str | None
    lengths: tuple[str, str] | None
    """`seqlens_k` and `total_sequence_length` of the fused operator."""
    positions: str | None


class LayoutWriter:
    """Builds the graphs of one layout."""

    def __init__(self, layout: Layout, weights: Mapping[str, npt.NDArray[np.float32]]) -> None:
        self.layout = layout
        self.weights = weights
        self.integer_type = TensorProto.INT32 if layout.int32_ids else TensorProto.INT64
        self.fused = layout.attention is Attention.FUSED

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
                self._pass(inner, output_names, cached=with_past)
                renamed = [self._renamed(value, output_names[value.name]) for value in outputs]
                branches[name] = helper.make_graph(inner.nodes, name, [], renamed)
            nodes.op("If", flag, outputs=[value.name for value in outputs], **branches)
        else:
            self._pass(nodes, {value.name: value.name for value in outputs}, cached=cached)
        return nodes.model(inputs, outputs, ir_version=8)

    def embedding(self) -> onnx.ModelProto:
        """Build the graph that makes embeddings of token ids."""
        nodes = Nodes(self.layout.opset)
        shape = ["batch_size", "sequence_length"]
        nodes.op("Identity", self._embedded(nodes, "input_ids"), outputs=["inputs_embeds"])
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
            for name, shape in zip(self._cache_names(side, layer), shapes[layout.cache], strict=True):
                values.append(helper.make_tensor_value_info(name, kind, shape))
        return values

    def _cache_names(self, side: str, layer: int) -> list[str]:
        cache = self.layout.cache
        if cache is Cache.STACKED:
            names = [f"{side}_{{}}"]
        elif cache is Cache.NUMBERED:
            names = [f"{side}_keys_{{}}", f"{side}_values_{{}}"]
        else:
            stem = "past_key_values" if side == "past" else "present"
            kinds = ["key_value"] if cache is Cache.JOINED else ["key", "value"]
            names = [f"{stem}.{{}}.{kind}" for kind in kinds]
        return [self.layout.name_of(name, layer) for name in names]

    @staticmethod
    def _renamed(value: onnx.ValueInfoProto, name: str) -> onnx.ValueInfoProto:
        copy = onnx.ValueInfoProto()
        copy.CopyFrom(value)
        copy.name = name
        return copy

    # Nodes

    def _pass(self, nodes: Nodes, output_names: Mapping[str, str], *, cached: bool) -> None:
        """One pass of the decoder; `output_names` are the names of the outputs in this graph or branch."""
        weights, layout = self.weights, self.layout
        ids = layout.name_of("input_ids" if layout.embedding is Embedding.INSIDE else "inputs_embeds")
        shared = self._shared_values(nodes, ids, cached=cached)
        hidden = self._embedded(nodes, ids) if layout.embedding is Embedding.INSIDE else ids
        for layer in range(LAYERS):
            name = f"model.layers.{layer}"
            normed = self._norm(nodes, hidden, f"{name}.input_layernorm.weight")
            mixed = self._mixed(nodes, shared, output_names, layer, normed, cached=cached)
            hidden = nodes.op("Add", hidden, self._linear(nodes, mixed, f"{name}.self_attn.o_proj.weight"))
            normed = self._norm(nodes, hidden, f"{name}.post_attention_layernorm.weight")
            gate, up = (self._linear(nodes, normed, f"{name}.mlp.{part}_proj.weight") for part in ("gate", "up"))
            wide = nodes.op("Mul", nodes.op("Mul", gate, nodes.op("Sigmoid", gate)), up)
            hidden = nodes.op("Add", hidden, self._linear(nodes, wide, f"{name}.mlp.down_proj.weight"))
        hidden = self._norm(nodes, hidden, "model.norm.weight")
        if layout.logit_output is LogitOutput.LAST_N:
            first = nodes.op("Reshape", nodes.op("Neg", layout.name_of("num_logits_to_keep")), nodes.constant([1]))
            last = nodes.constant([np.iinfo(np.int64).max])
            hidden = nodes.op("Slice", hidden, first, last, nodes.constant([1]))
        elif layout.logit_output is not LogitOutput.ALL:
            index = [-1] if layout.logit_output is LogitOutput.LAST else -1
            hidden = nodes.op("Gather", hidden, nodes.constant(index), axis=1)
        target = output_names[layout.name_of("logits")]
        if layout.float16_logits:
            logits = self._linear(nodes, hidden, "model.embed_tokens.weight")
            nodes.op("Cast", logits, to=TensorProto.FLOAT16, outputs=[target])
        else:
            head = nodes.constant(weights["model.embed_tokens.weight"].T, np.float32, "lm_head.transposed")
            nodes.op("MatMul", hidden, head, outputs=[target])

    def _embedded(self, nodes: Nodes, ids: str) -> str:
        table = self.weights["model.embed_tokens.weight"]
        return nodes.op("Gather", nodes.constant(table, np.float32, "model.embed_tokens.weight"), ids, axis=0)

    def _norm(self, nodes: Nodes, value: str, name: str) -> str:
        return nodes.norm(value, name, self.weights[name], fused=self.fused)

    def _linear(self, nodes: Nodes, value: str, name: str) -> str:
        return nodes.linear(value, name, self.weights[name])

    def _shared_values(self, nodes: Nodes, ids: str, *, cached: bool) -> SharedValues:
        layout = self.layout
        new = nodes.extent(ids, 1)
        past = None
        total = new
        if cached and not (self.fused and layout.mask is not Mask.NONE):
            axis = {Cache.STACKED: 3, Cache.JOINED: 1, Cache.KEYS_TRANSPOSED: 3}.get(layout.cache, 2)
            past = nodes.extent(self._cache_names("past", state_layers(layout))[0], axis)
            total = nodes.op("Add", past, new)
        positions = None if layout.positions is Positions.LENGTH else layout.name_of("position_ids")
        if self.fused:
            angles = np.arange(CONTEXT)[:, None] * 10000.0 ** (-2 * np.arange(HEAD_DIM // 2) / HEAD_DIM)
            dtype = np.float16 if layout.cache_type is CacheType.FLOAT16 else np.float32
            cosine, sine = (nodes.constant(f(angles), dtype, f"{f.__name__}_cache") for f in (np.cos, np.sin))
            lengths, total = self._lengths(nodes, total)
            bias = None
            if layout.bias_inside:
                past = nodes.op("Sub", total, new)
                bias = self._bias(nodes, past, new, total)
            return SharedValues(new, past, total, cosine, sine, bias, lengths, positions)
        cosine, sine = self._angles(nodes, positions, past, new, total)
        return SharedValues(new, past, total, cosine, sine, self._bias(nodes, past, new, total), None, positions)

    def _lengths(self, nodes: Nodes, total: str) -> tuple[tuple[str, str], str]:
        """`seqlens_k` int32 [1] and `total_sequence_length` int32, and the latter as int64 [1]."""
        layout, int32 = self.layout, TensorProto.INT32
        scalar = nodes.constant([], np.int64, "no_dimensions")
        if layout.mask is Mask.LENGTHS:
            before = nodes.op("Reshape", layout.name_of("past_seq_len"), nodes.constant([1]))
            total = layout.name_of("total_seq_len")
            whole = nodes.op("Cast", total, to=TensorProto.INT64)
            return (before, nodes.op("Reshape", total, scalar)), whole
        if layout.mask is Mask.NONE:
            before = nodes.op("Cast", nodes.op("Sub", total, nodes.constant([1])), to=int32)
            return (before, nodes.op("Cast", nodes.op("Reshape", total, scalar), to=int32)), total
        mask = nodes.op("Cast", layout.name_of("attention_mask"), to=TensorProto.INT64)
        seen = nodes.op("ReduceSum", mask, nodes.constant([1]), keepdims=0)
        before = nodes.op("Cast", nodes.op("Sub", seen, nodes.constant([1])), to=int32)
        total = nodes.extent(mask, 1)
        return (before, nodes.op("Cast", nodes.op("Reshape", total, scalar), to=int32)), total

    def _angles(self, nodes: Nodes, positions: str | None, past: str | None, new: str, total: str) -> tuple[str, str]:
        """Cosine and sine [batch, 1, new, 16] from tables, gathered by position."""
        angles = np.arange(CONTEXT)[:, None] * 10000.0 ** (-2 * np.arange(HEAD_DIM // 2) / HEAD_DIM)
        if positions is None:
            counted = nodes.span(past or nodes.constant([0]), total)
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
        return turned[0], turned[1]

    def _bias(self, nodes: Nodes, past: str | None, new: str, total: str) -> str:
        """float32 [batch or 1, 1, new or 1, total]: zero where a token is attended to, else a large negative number."""
        layout = self.layout
        if layout.mask is Mask.BIAS:
            return layout.name_of("attention_mask")
        zero = nodes.constant([0])
        lowest = float(np.finfo(np.float32).min)
        if layout.mask in (Mask.BOOL_ATTENDED, Mask.BOOL_BLOCKED):
            added = (0, lowest) if layout.mask is Mask.BOOL_ATTENDED else (lowest, 0)
            return nodes.op("Where", layout.name_of("attention_mask"), *(nodes.constant(x, np.float32) for x in added))
        seen: str | None = None
        if layout.mask is not Mask.NONE and not self.fused:
            mask = nodes.op("Cast", layout.name_of("attention_mask"), to=TensorProto.BOOL)
            seen = nodes.op("Unsqueeze", mask, nodes.constant([1, 2]))
        if layout.mask is not Mask.NOT_CAUSAL or past is None:
            queries = nodes.op("Unsqueeze", nodes.span(past or zero, total), nodes.constant([1]))
            keys = nodes.op("Unsqueeze", nodes.span(zero, total), zero)
            causal = nodes.op("Unsqueeze", nodes.op("LessOrEqual", keys, queries), nodes.constant([0, 1]))
            seen = causal if seen is None else nodes.op("And", seen, causal)
        assert seen is not None
        dtype = np.float16 if self.fused and layout.cache_type is CacheType.FLOAT16 else np.float32
        lowest = float(np.finfo(dtype).min)
        return nodes.op("Where", seen, nodes.constant(0, dtype), nodes.constant(lowest, dtype))

    def _mixed(
        self,
        nodes: Nodes,
        shared: SharedValues,
        output_names: Mapping[str, str],
        layer: int,
        normed: str,
        *,
        cached: bool,
    ) -> str:
        """What a layer's output projection takes, [batch, new, hidden]."""
        name = f"model.layers.{layer}.self_attn"
        projected = [self._linear(nodes, normed, f"{name}.{part}_proj.weight") for part in "qkv"]
        if layer < state_layers(self.layout):
            return write_mixer(nodes, self.layout, output_names, layer, normed, projected, cached=cached)
        attention = self._fused if self.fused else self._unfused
        return attention(nodes, shared, output_names, layer, projected)

    def _fused(
        self, nodes: Nodes, shared: SharedValues, output_names: Mapping[str, str], layer: int, projected: Sequence[str]
    ) -> str:
        layout = self.layout
        half = layout.cache_type is CacheType.FLOAT16
        if half:
            projected = [nodes.op("Cast", part, to=TensorProto.FLOAT16) for part in projected]
        assert shared.lengths is not None
        inputs = [*projected, *self._cache_names("past", layer), *shared.lengths, shared.cosine, shared.sine]
        attributes: dict[str, Any] = {"num_heads": HEADS, "kv_num_heads": layout.kv_heads, "do_rotary": 1}
        if layout.bias_inside:
            inputs += [shared.positions or "", shared.bias or ""]
        if layout.window is not None and layer % 2 == 1:
            attributes |= {"local_window_size": layout.window, "sliding_window_cache": int(layout.window_cache)}
        if layout.cache_type is CacheType.INT8:
            scale = nodes.constant([INT8_SCALE], np.float32)
            inputs += [""] * (12 - len(inputs)) + [scale, scale]
            attributes |= {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
        output = f"{nodes.prefix}attended_{layer}"
        outputs = [output, *(output_names[name] for name in self._cache_names("present", layer))]
        nodes.op("GroupQueryAttention", *inputs, outputs=outputs, domain="com.microsoft", **attributes)
        return nodes.op("Cast", output, to=TensorProto.FLOAT) if half else output

    def _unfused(
        self, nodes: Nodes, shared: SharedValues, output_names: Mapping[str, str], layer: int, projected: Sequence[str]
    ) -> str:
        layout = self.layout
        apart = nodes.constant([0, 0, -1, HEAD_DIM])
        query, key, value = (
            nodes.op("Transpose", nodes.op("Reshape", part, apart), perm=[0, 2, 1, 3]) for part in projected
        )
        query, key = self._rotate(nodes, shared, query), self._rotate(nodes, shared, key)
        key, value = self._cached(nodes, shared, output_names, layer, key, value)
        repeats = HEADS // layout.kv_heads
        for_heads = []
        for part in (key, value):
            spread = nodes.op("Unsqueeze", part, nodes.constant([2]))
            shape = nodes.op(
                "Concat",
                nodes.op("Slice", nodes.op("Shape", spread), nodes.constant([0]), nodes.constant([2])),
                nodes.constant([repeats]),
                nodes.op("Slice", nodes.op("Shape", spread), nodes.constant([3]), nodes.constant([5])),
                axis=0,
            )
            wide = nodes.op("Expand", spread, shape)
            for_heads.append(nodes.op("Reshape", wide, nodes.constant([0, HEADS, -1, HEAD_DIM])))
        turned = nodes.op("Transpose", for_heads[0], perm=[0, 1, 3, 2])
        scores = nodes.op("Mul", nodes.op("MatMul", query, turned), nodes.constant(1 / np.sqrt(HEAD_DIM), np.float32))
        assert shared.bias is not None
        probs = nodes.op("Softmax", nodes.op("Add", scores, shared.bias), axis=-1)
        attended = nodes.op("Transpose", nodes.op("MatMul", probs, for_heads[1]), perm=[0, 2, 1, 3])
        return nodes.op("Reshape", attended, nodes.constant([0, 0, HEADS * HEAD_DIM]))

    def _cached(
        self, nodes: Nodes, shared: SharedValues, output_names: Mapping[str, str], layer: int, key: str, value: str
    ) -> tuple[str, str]:
        """Keys and values of cached and new tokens; also writes the present outputs."""
        layout = self.layout
        half = layout.cache_type is CacheType.FLOAT16
        past = self._cache_names("past", layer)
        present = [output_names[name] for name in self._cache_names("present", layer)]
        if half:
            key, value = (nodes.op("Cast", part, to=TensorProto.FLOAT16) for part in (key, value))
        if shared.past is not None:
            if layout.cache is Cache.STACKED:
                earlier = [nodes.op("Gather", past[0], nodes.constant(i), axis=0) for i in (0, 1)]
            elif layout.cache is Cache.JOINED:
                halves = [f"{nodes.prefix}{past[0]}.{kind}" for kind in ("key", "value")]
                nodes.op("Split", past[0], nodes.constant([HEAD_DIM, HEAD_DIM]), outputs=halves, axis=-1)
                earlier = [nodes.op("Unsqueeze", part, nodes.constant([1])) for part in halves]
            elif layout.cache is Cache.KEYS_TRANSPOSED:
                earlier = [nodes.op("Transpose", past[0], perm=[0, 1, 3, 2]), past[1]]
            else:
                earlier = past
            key, value = (nodes.op("Concat", old, now, axis=2) for old, now in zip(earlier, (key, value), strict=True))
        if layout.cache is Cache.STACKED:
            both = (nodes.op("Unsqueeze", part, nodes.constant([0])) for part in (key, value))
            nodes.op("Concat", *both, axis=0, outputs=present)
        elif layout.cache is Cache.JOINED:
            both = (nodes.op("Squeeze", part, nodes.constant([1])) for part in (key, value))
            nodes.op("Concat", *both, axis=-1, outputs=present)
        else:
            transposed = layout.cache is Cache.KEYS_TRANSPOSED
            if transposed:
                nodes.op("Transpose", key, perm=[0, 1, 3, 2], outputs=present[:1])
            else:
                nodes.op("Identity", key, outputs=present[:1])
            nodes.op("Identity", value, outputs=present[1:])
        if half:
            key, value = (nodes.op("Cast", part, to=TensorProto.FLOAT) for part in (key, value))
        return key, value

    @staticmethod
    def _rotate(nodes: Nodes, shared: SharedValues, value: str) -> str:
        half, end = nodes.constant([HEAD_DIM // 2]), nodes.constant([HEAD_DIM])
        axis = nodes.constant([3])
        first = nodes.op("Slice", value, nodes.constant([0]), half, axis)
        second = nodes.op("Slice", value, half, end, axis)
        turned = nodes.op("Concat", nodes.op("Neg", second), first, axis=-1)
        return nodes.op("Add", nodes.op("Mul", value, shared.cosine), nodes.op("Mul", turned, shared.sine))
