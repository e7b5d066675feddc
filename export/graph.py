"""The decoder as one ONNX graph for prefill, decoding and tree verification.

The inputs and outputs are the graph contract (`contract`). Attention is one GroupQueryAttention a layer on the caller's
key-value buffers; linears of fewer than 32 bits are MatMulNBits at accuracy level 4 (8-bit activations), the level at
which every bit width has a fast kernel on CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, helper

from ..models.manifest import WeightFormat
from . import contract
from .config import DecoderConfig
from .initializers import Initializers
from .layout import FINAL_NORM, Layer, Unit, embedding_layout, head_layout, layer_layout
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
        weights: makes and stores the initializers.

    Returns:
        The model; its large initializers refer to the external data file.

    Raises:
        CheckpointError: a tensor cannot be read.
        OSError: the disk refused a write.
    """
    graph = _Decoder(config, context, plan, weights).build()
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)],
        ir_version=IR_VERSION,
        producer_name="edge-run",
    )


class _Decoder:
    """Appends nodes layer by layer; methods take and return names of tensors."""

    def __init__(
        self, config: DecoderConfig, context: int, plan: Mapping[str, WeightFormat], weights: Initializers
    ) -> None:
        self._config = config
        self._context = context
        self._plan = plan
        self._weights = weights
        self._nodes: list[NodeProto] = []
        self._shapes: set[str] = set()
        self._table: tuple[str, ...] = ()
        """The embedding's initializers, for a tied head: the matrix, or codes and scales."""

    def build(self) -> GraphProto:
        config = self._config
        cosines, sines = config.rope.table(config.head_dim, self._context)
        self._weights.constant("rope.cos", cosines)
        self._weights.constant("rope.sin", sines)
        residual = self._embedding()
        layers = [layer_layout(config, index) for index in range(config.layers)]
        normed = self._norm(residual, layers[0].attention_norm, "layers.0.input_norm")
        for index, layer in enumerate(layers):
            name = f"layers.{index}"
            last = index == config.layers - 1
            attended = self._attention(index, layer, normed)
            if last:
                # Nothing below mixes rows, so rows whose logits nobody asked for stop here.
                attended = self._node("Gather", [attended, "logit_rows"], "asked.attended", axis=1)
                residual = self._node("Gather", [residual, "logit_rows"], "asked.residual", axis=1)
            projected = self._linear(layer.output, attended)
            normed, residual = self._add_and_norm(projected, residual, layer.mlp_norm, f"{name}.mlp_norm")
            fed = self._feed_forward(name, layer, normed)
            following = FINAL_NORM if last else layers[index + 1].attention_norm
            normed, residual = self._add_and_norm(fed, residual, following, f"{name}.next_norm")
        self._head(normed)
        return GraphProto(
            name="decoder",
            node=self._nodes,
            initializer=self._weights.protos,
            input=contract.inputs(config),
            output=contract.outputs(config),
        )

    def _embedding(self) -> str:
        """Rows of the embedding, [1, M, hidden]."""
        unit, form = embedding_layout(self._config), self._plan["embedding"]
        if form.bits == 32:
            self._table = (self._weights.plain(unit),)
            return self._node("Gather", [*self._table, "input_ids"], "embedded", axis=0)
        codes, scales = self._table = self._weights.quantized(unit, form, gathered=True)
        gathered = self._node(
            "GatherBlockQuantized",
            [codes, "input_ids", scales],
            "embedded.blocks",
            domain=MICROSOFT,
            bits=form.bits,
            block_size=form.block,
            gather_axis=0,
            quantize_axis=2,
        )
        joined = self._node("Reshape", [gathered, self._integers("embedded.shape", 0, 0, -1)], "embedded.joined")
        columns = unit.columns
        if columns % form.block == 0:
            return joined
        bounds = [
            self._integers("embedded.starts", 0),
            self._integers("embedded.ends", columns),
            self._integers("embedded.axes", 2),
        ]
        return self._node("Slice", [joined, *bounds], "embedded")

    def _attention(self, index: int, layer: Layer, normed: str) -> str:
        """All heads' attention, [1, M, heads * head_dim], before the output projection."""
        config, name = self._config, f"layers.{index}"
        query, key, value = self._linear(layer.qkv, normed), "", ""
        rotates = config.head_dim % _ROTARY_HEAD_MULTIPLE == 0
        if config.qk_norm or not rotates:
            query, key, value = self._split(
                query, [f"{name}.query", f"{name}.key", f"{name}.value"], self._head_widths()
            )
        if config.qk_norm:
            query = self._norm_heads(query, layer.query_norm)
            key = self._norm_heads(key, layer.key_norm)
        if not rotates:
            query, key = self._rotate(query, config.heads), self._rotate(key, config.kv_heads)
        attended = f"{name}.attended"
        rotary = ["rope.cos", "rope.sin", "position_ids"] if rotates else ["", "", ""]
        self._nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                [
                    *(query, key, value),
                    *(contract.past_key(index), contract.past_value(index)),
                    *("seqlens_k", "total_sequence_length"),
                    *(*rotary, "attention_bias"),
                ],
                [attended, contract.present_key(index), contract.present_value(index)],
                name=attended,
                domain=MICROSOFT,
                num_heads=config.heads,
                kv_num_heads=config.kv_heads,
                do_rotary=int(rotates),
            )
        )
        return attended

    def _head_widths(self) -> str:
        return self._integers("heads.widths", self._config.query_width, self._config.kv_width, self._config.kv_width)

    def _norm_heads(self, heads: str, weight: str) -> str:
        """RMS norm of every head by itself; GroupQueryAttention's own norm inputs are refused on CPU."""
        apart = self._integers("heads.apart", 0, 0, -1, self._config.head_dim)
        together = self._integers("heads.together", 0, 0, -1)
        split = self._node("Reshape", [heads, apart], f"{heads}.apart")
        normed = self._norm(split, weight, f"{heads}.normed")
        return self._node("Reshape", [normed, together], f"{heads}.together")

    def _rotate(self, heads: str, count: int) -> str:
        return self._node(
            "RotaryEmbedding",
            [heads, "position_ids", "rope.cos", "rope.sin"],
            f"{heads}.rotated",
            domain=MICROSOFT,
            num_heads=count,
        )

    def _feed_forward(self, name: str, layer: Layer, normed: str) -> str:
        """silu(gate) * up, projected down."""
        width = self._config.intermediate_size
        both = self._linear(layer.gate_up, normed)
        gate, up = self._split(both, [f"{name}.gate", f"{name}.up"], self._integers("mlp.widths", width, width))
        # QuickGelu is x * sigmoid(alpha * x): SiLU in one node.
        active = self._node("QuickGelu", [gate], f"{name}.silu", domain=MICROSOFT, alpha=1.0)
        return self._linear(layer.down, self._node("Mul", [active, up], f"{name}.gated"))

    def _head(self, normed: str) -> None:
        """Logits, [R, vocabulary]."""
        rows = self._node("Squeeze", [normed, self._integers("head.axes", 0)], "head.rows")
        unit, form, tied = head_layout(self._config), self._plan["head"], self._config.tied_head
        if form.bits == 32:
            (matrix,) = self._table if tied else (self._weights.plain(unit),)
            self._node("Gemm", [rows, matrix], contract.LOGITS, transB=1)
        else:
            codes, scales = self._tied_table(unit, form) if tied else self._weights.quantized(unit, form)
            self._matmul_nbits(unit, form, [rows, codes, scales], contract.LOGITS)

    def _tied_table(self, unit: Unit, form: WeightFormat) -> tuple[str, str]:
        """The embedding's codes and scales as MatMulNBits wants them: the same bytes, in the file and in memory."""
        codes, scales = self._table
        return codes, self._weights.reshaped(scales, "head.scales", (unit.shape[0], blocks_of(unit.columns, form)))

    def _linear(self, unit: Unit, value: str) -> str:
        form = self._plan[unit.name]
        bias = self._weights.vector(f"{unit.name}.bias", unit.biases) if unit.biased else ""
        if form.bits != 32:
            codes, scales = self._weights.quantized(unit, form)
            inputs = [value, codes, scales, "", "", bias] if bias else [value, codes, scales]
            return self._matmul_nbits(unit, form, inputs, unit.name)
        product = self._node("MatMul", [value, self._weights.plain_transposed(unit)], f"{unit.name}.product")
        return self._node("Add", [product, bias], unit.name) if bias else product

    def _matmul_nbits(self, unit: Unit, form: WeightFormat, inputs: list[str], output: str) -> str:
        return self._node(
            "MatMulNBits",
            inputs,
            output,
            domain=MICROSOFT,
            N=unit.shape[0],
            K=unit.shape[1],
            bits=form.bits,
            block_size=form.block,
            accuracy_level=_INT8_ACTIVATIONS,
        )

    def _norm(self, value: str, weight: str, output: str) -> str:
        return self._node(
            "SimplifiedLayerNormalization",
            [value, self._weights.vector(f"{output}.weight", [weight])],
            output,
            axis=-1,
            epsilon=self._config.norm_epsilon,
            stash_type=1,
        )

    def _add_and_norm(self, value: str, residual: str, weight: str, output: str) -> tuple[str, str]:
        """RMS norm of `value + residual`, and that sum."""
        total = f"{output}.residual"
        self._nodes.append(
            helper.make_node(
                "SkipSimplifiedLayerNormalization",
                [value, residual, self._weights.vector(f"{output}.weight", [weight])],
                [output, "", "", total],
                name=output,
                domain=MICROSOFT,
                epsilon=self._config.norm_epsilon,
            )
        )
        return output, total

    def _split(self, value: str, outputs: list[str], widths: str) -> list[str]:
        self._nodes.append(helper.make_node("Split", [value, widths], outputs, name=outputs[0], axis=-1))
        return outputs

    def _integers(self, name: str, *values: int) -> str:
        """A small int64 constant, made once."""
        if name not in self._shapes:
            self._shapes.add(name)
            self._weights.constant(name, np.array(values, np.int64))
        return name

    def _node(self, operator: str, inputs: list[str], output: str, domain: str = "", **attributes: Any) -> str:
        node = helper.make_node(operator, inputs, [output], name=output, domain=domain, **attributes)
        self._nodes.append(node)
        return output
