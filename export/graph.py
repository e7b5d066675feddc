"""The decoder as one ONNX graph for prefill, decoding and tree verification.

The inputs and outputs are the graph contract (docs/graph-contract.md). Attention is one GroupQueryAttention a layer on
the caller's key-value buffers; linears of fewer than 32 bits are MatMulNBits at accuracy level 4 (8-bit activations),
the level at which every bit width has a fast kernel on CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from ..models.manifest import WeightFormat
from .config import DecoderConfig
from .initializers import Initializers
from .quantize import blocks_of

OPSET: Final = 21
IR_VERSION: Final = 10
MICROSOFT: Final = "com.microsoft"
_INT8_ACTIVATIONS: Final = 4
_ROTARY_HEAD_MULTIPLE: Final = 16
"""GroupQueryAttention rotates heads of a multiple of this many channels; others are rotated in front of it."""


def build_graph(
    config: DecoderConfig, context: int, plan: Mapping[str, WeightFormat], weights: Initializers
) -> ModelProto:
    """Build the graph and stream its weights out.

    Args:
        config: the model's numbers.
        context: positions in the rotary table.
        plan: weight format by unit (see `Manifest.weights`).
        weights: where initializers are made and stored.

    Returns:
        The model; its large initializers refer to the external data file.

    Raises:
        CheckpointError: a tensor cannot be read.
        OSError: the disk refused a write.
    """
    return _Decoder(config, context, plan, weights).build()


class _Decoder:
    """Appends nodes layer by layer; every method returns the name of the tensor it made."""

    def __init__(
        self, config: DecoderConfig, context: int, plan: Mapping[str, WeightFormat], weights: Initializers
    ) -> None:
        self._config = config
        self._context = context
        self._plan = plan
        self._weights = weights
        self._nodes: list[NodeProto] = []
        self._constants: set[str] = set()
        self._table: tuple[str, ...] = ()
        """The embedding's initializers, for a tied head: the matrix, or codes and scales."""

    def build(self) -> ModelProto:
        config, weights = self._config, self._weights
        cosines, sines = config.rope.table(config.head_dim, self._context)
        weights.small("rope.cos", cosines)
        weights.small("rope.sin", sines)
        residual = self._embedding()
        first = weights.tensor("model.layers.0.input_layernorm.weight")
        normed = self._norm(residual, first, "layers.0.input_norm")
        for layer in range(config.layers):
            attended = self._attention(layer, normed)
            if layer == config.layers - 1:
                # Nothing below mixes rows, so the rows without logits stop here.
                attended = self._node("Gather", [attended, "logit_rows"], "asked.attended", axis=1)
                residual = self._node("Gather", [residual, "logit_rows"], "asked.residual", axis=1)
            prefix = f"layers.{layer}"
            projected = self._linear(f"{prefix}.o", [f"{prefix}.self_attn.o_proj"], attended, config.output_bias)
            normed, residual = self._add_and_norm(
                projected, residual, f"model.{prefix}.post_attention_layernorm.weight", f"{prefix}.mlp_norm"
            )
            fed = self._feed_forward(layer, normed)
            last = layer == config.layers - 1
            following = "model.norm.weight" if last else f"model.layers.{layer + 1}.input_layernorm.weight"
            name = "final_norm" if last else f"layers.{layer + 1}.input_norm"
            normed, residual = self._add_and_norm(fed, residual, following, name)
        self._head(normed)
        graph = GraphProto(name="decoder", node=self._nodes, initializer=weights.protos)
        graph.input.extend(_inputs(config))
        graph.output.extend(_outputs(config))
        return helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)],
            ir_version=IR_VERSION,
            producer_name="edge-run",
        )

    def _embedding(self) -> str:
        """Rows of the embedding, float32 [1, M, hidden]."""
        form = self._plan["embedding"]
        source = ["model.embed_tokens.weight"]
        if form.bits == 32:
            self._table = (self._weights.plain("embedding", source, transposed=False),)
            return self._node("Gather", [self._table[0], "input_ids"], "embedded", axis=0)
        codes, scales = self._table = self._weights.quantized("embedding", source, form)
        scales_shape = (self._config.vocab_size, blocks_of(self._config.hidden_size, form), 1)
        gather_scales = self._weights.reshaped(scales, "embedding.gather_scales", scales_shape)
        blocks = self._node(
            "GatherBlockQuantized",
            [codes, "input_ids", gather_scales],
            "embedded.blocks",
            domain=MICROSOFT,
            bits=form.bits,
            block_size=form.block,
            gather_axis=0,
            quantize_axis=2,
        )
        rows = self._node("Reshape", [blocks, self._integers("embedded.shape", 0, 0, -1)], "embedded.rows")
        if self._config.hidden_size % form.block == 0:
            return rows
        bounds = [self._integers(f"embedded.{name}", value) for name, value in self._tail_cut()]
        return self._node("Slice", [rows, *bounds], "embedded")

    def _tail_cut(self) -> list[tuple[str, int]]:
        return [("from", 0), ("to", self._config.hidden_size), ("axis", 2)]

    def _attention(self, layer: int, normed: str) -> str:
        """All heads' attention, float32 [1, M, heads * head_dim], before the output projection."""
        config, prefix = self._config, f"layers.{layer}"
        sources = [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]
        packed = self._linear(f"{prefix}.qkv", sources, normed, config.qkv_bias)
        rotary = ["rope.cos", "rope.sin", "position_ids"]
        if config.head_dim % _ROTARY_HEAD_MULTIPLE:
            query, key, value = self._heads(layer, packed)
            query, key = (
                self._node(
                    "RotaryEmbedding",
                    [heads, "position_ids", "rope.cos", "rope.sin"],
                    f"{heads}.rotated",
                    domain=MICROSOFT,
                    num_heads=count,
                )
                for heads, count in ((query, config.heads), (key, config.kv_heads))
            )
            rotary = ["", "", ""]
        elif config.qk_norm:
            query, key, value = self._heads(layer, packed)
        else:
            query, key, value = packed, "", ""
        past = [f"past_key_values.{layer}.{name}" for name in ("key", "value")]
        attended = f"{prefix}.attended"
        self._nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                [query, key, value, *past, "seqlens_k", "total_sequence_length", *rotary, "attention_bias"],
                [attended, f"present.{layer}.key", f"present.{layer}.value"],
                name=attended,
                domain=MICROSOFT,
                num_heads=config.heads,
                kv_num_heads=config.kv_heads,
                do_rotary=int(rotary[0] != ""),
            )
        )
        return attended

    def _heads(self, layer: int, packed: str) -> tuple[str, str, str]:
        """Query, key and value apart, [1, M, width] each, queries and keys normalized where the family does so."""
        config, prefix = self._config, f"layers.{layer}"
        widths = self._integers(f"{prefix}.qkv.widths", config.query_width, config.kv_width, config.kv_width)
        query, key, value = (f"{prefix}.{name}" for name in ("query", "key", "value"))
        self._nodes.append(helper.make_node("Split", [packed, widths], [query, key, value], name=query, axis=-1))
        if config.qk_norm:
            query, key = (self._norm_heads(layer, *heads) for heads in ((query, "q_norm"), (key, "k_norm")))
        return query, key, value

    def _norm_heads(self, layer: int, heads: str, norm: str) -> str:
        apart = self._integers("heads.apart", 0, 0, -1, self._config.head_dim)
        together = self._integers("heads.together", 0, 0, -1)
        split = self._node("Reshape", [heads, apart], f"{heads}.apart")
        weight = self._weights.tensor(f"model.layers.{layer}.self_attn.{norm}.weight")
        normed = self._norm(split, weight, f"{heads}.normed")
        return self._node("Reshape", [normed, together], f"{heads}.together")

    def _feed_forward(self, layer: int, normed: str) -> str:
        """silu(gate) * up, projected down."""
        config, prefix = self._config, f"layers.{layer}"
        sources = [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"]
        both = self._linear(f"{prefix}.gate_up", sources, normed, config.mlp_bias)
        gate, up = f"{prefix}.gate", f"{prefix}.up"
        self._nodes.append(helper.make_node("Split", [both], [gate, up], name=gate, axis=-1, num_outputs=2))
        active = self._node("QuickGelu", [gate], f"{prefix}.silu", domain=MICROSOFT, alpha=1.0)
        product = self._node("Mul", [active, up], f"{prefix}.product")
        return self._linear(f"{prefix}.down", [f"{prefix}.mlp.down_proj"], product, config.mlp_bias)

    def _head(self, normed: str) -> None:
        """Logits, float32 [R, vocabulary]."""
        rows = self._node("Squeeze", [normed, self._integers("head.axes", 0)], "head.rows")
        form = self._plan["head"]
        tied = self._config.tied_head
        if form.bits == 32:
            table = self._table[0] if tied else self._weights.plain("head", ["lm_head.weight"], transposed=False)
            self._node("Gemm", [rows, table], "logits", transB=1)
            return
        if tied:
            codes, scales = self._table
        else:
            codes, scales = self._weights.quantized("head", ["lm_head.weight"], form)
        shape = (self._config.vocab_size, self._config.hidden_size)
        self._matmul_nbits(rows, codes, scales, "", "logits", shape, form)

    def _linear(self, unit: str, modules: list[str], value: str, bias: bool) -> str:
        """One fused linear: the modules' outputs side by side."""
        form = self._plan[unit]
        sources = [f"model.{module}.weight" for module in modules]
        offset = self._weights.joined(f"{unit}.bias", [f"model.{module}.bias" for module in modules]) if bias else ""
        if form.bits == 32:
            weight = self._weights.plain(unit, sources, transposed=True)
            product = self._node("MatMul", [value, weight], f"{unit}.product" if bias else unit)
            return self._node("Add", [product, offset], unit) if bias else product
        codes, scales = self._weights.quantized(unit, sources, form)
        return self._matmul_nbits(value, codes, scales, offset, unit, self._weights.joined_shape(sources), form)

    def _matmul_nbits(
        self, value: str, codes: str, scales: str, bias: str, name: str, shape: tuple[int, int], form: WeightFormat
    ) -> str:
        inputs = [value, codes, scales, "", "", bias] if bias else [value, codes, scales]
        return self._node(
            "MatMulNBits",
            inputs,
            name,
            domain=MICROSOFT,
            N=shape[0],
            K=shape[1],
            bits=form.bits,
            block_size=form.block,
            accuracy_level=_INT8_ACTIVATIONS,
        )

    def _norm(self, value: str, weight: str, name: str) -> str:
        return self._node(
            "SimplifiedLayerNormalization",
            [value, weight],
            name,
            axis=-1,
            epsilon=self._config.norm_epsilon,
            stash_type=1,
        )

    def _add_and_norm(self, value: str, residual: str, weight: str, name: str) -> tuple[str, str]:
        """RMS norm of `value + residual`, and that sum."""
        total = f"{name}.residual"
        self._nodes.append(
            helper.make_node(
                "SkipSimplifiedLayerNormalization",
                [value, residual, self._weights.tensor(weight)],
                [name, "", "", total],
                name=name,
                domain=MICROSOFT,
                epsilon=self._config.norm_epsilon,
            )
        )
        return name, total

    def _integers(self, name: str, *values: int) -> str:
        if name not in self._constants:
            self._constants.add(name)
            self._weights.small(name, np.array(values, np.int64))
        return name

    def _node(self, operator: str, inputs: list[str], output: str, **attributes: object) -> str:
        self._nodes.append(helper.make_node(operator, inputs, [output], name=output, **attributes))
        return output


def _inputs(config: DecoderConfig) -> list[ValueInfoProto]:
    value, float32, int32, int64 = helper.make_tensor_value_info, TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64
    return [
        value("input_ids", int64, [1, "M"]),
        value("position_ids", int64, [1, "M"]),
        value("attention_bias", float32, [1, 1, "M", "T"]),
        value("seqlens_k", int32, [1]),
        value("total_sequence_length", int32, []),
        value("logit_rows", int64, ["R"]),
        *_buffers(config, "past_key_values"),
    ]


def _outputs(config: DecoderConfig) -> list[ValueInfoProto]:
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["R", config.vocab_size])
    return [logits, *_buffers(config, "present")]


def _buffers(config: DecoderConfig, prefix: str) -> list[ValueInfoProto]:
    shape = [1, config.kv_heads, "capacity", config.head_dim]
    return [
        helper.make_tensor_value_info(f"{prefix}.{layer}.{name}", TensorProto.FLOAT, shape)
        for layer in range(config.layers)
        for name in ("key", "value")
    ]
