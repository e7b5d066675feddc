"""The decoder as a static graph of plain operators, for one width and one cache capacity.

NPU compilers want fixed shapes and plain operators: attention is two products and a softmax over the cached and the new
keys, the rotation is four operators over rows of a table, what a token may attend to is an additive mask of the caller,
and only the new keys and values come back, which the caller writes into its cache (docs/graph-contract.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorProto, helper

from ...models.bundle import Bundle
from ...models.manifest import DeviceKind, FileDigest, Precision, VariantFile
from ...models.progress import Progress
from ...runtime.graph.ort import load_session, session_options
from ...runtime.graph.static_variants import LOGIT_ROWS, MASK, NEXT_IDS, StaticSession, static_graph_io
from ...runtime.kv.buffers import StackedBuffers
from ..bundle_content import BundleContent
from ..check.contract_session import ContractSession, export_errors, require_close
from ..check.parity import with_float_activations
from ..check.reference import TokenArray
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import Layer, Norm, QuantPlan
from ..checkpoint.layout import embedding_layout, final_norm, head_layout, layer_layout
from ..checkpoint.rope import Rope
from ..graph import inputs_outputs
from ..graph.decoder import append_second_half, as_model
from ..graph.initializers import WeightFile
from .npu_weights import NpuWeights
from .static_nodes import StaticNodes
from .static_shapes import StaticShape

NPU_WEIGHTS_NAME: Final = "model_npu.onnx.data"
_STAGE: Final = "writing NPU graphs"
_CHECK_STAGE: Final = "checking NPU graphs"
TOLERANCE: Final = 0.25
"""Largest allowed difference of a logit from that of model.onnx, relative to the standard deviation of the logits. A
wrong mask, rotation or norm changes logits by about that deviation."""
_CHECKED_TOKENS: Final = 24


def mask_name(window: int | None) -> str:
    """Name of the mask input of layers with a sliding window of that many tokens, None for full attention."""
    return MASK if window is None else f"{MASK}_{window}"


def build_static_graph(
    config: DecoderConfig, plan: QuantPlan, weights: NpuWeights, shape: StaticShape, positions: int, context: int
) -> ModelProto:
    """Build the graph of one width and capacity.

    Args:
        config: the architecture; its layers are dense.
        plan: the quantization plan of model.onnx.
        weights: the initializers, shared by all static graphs of the bundle.
        shape: width and capacity.
        positions: number of positions in the rotary tables.
        context: number of positions that model.onnx serves, on which some rope scalings depend.

    Returns:
        The model, whose large initializers refer to the bundle's data files.

    Raises:
        CheckpointError: a tensor cannot be read.
        OSError: the disk refused a write.
    """
    nodes = StaticNodes(config, plan, weights, shape.width)
    _Decoder(nodes, shape, positions, context).append()
    used = {name for node in nodes.protos for name in node.input}
    int32, float16, declare = TensorProto.INT32, TensorProto.FLOAT16, helper.make_tensor_value_info
    width, rows = shape.width, shape.logit_rows
    masks = dict.fromkeys(mask_name(layer.window) for layer in config.attention)
    inputs = [
        *(declare(name, int32, [1, width]) for name in ("input_ids", "position_ids")),
        *(declare(mask, float16, [1, 1, width, shape.capacity + width]) for mask in masks),
        *([declare(LOGIT_ROWS, int32, [1])] if rows != width else []),
        *inputs_outputs.caches(config, inputs_outputs.past_cache, shape.capacity, float16),
    ]
    outputs = [
        declare(NEXT_IDS, int32, [rows]),
        declare(inputs_outputs.LOGITS, float16, [rows, config.vocab_size]),
        *inputs_outputs.caches(config, inputs_outputs.present_cache, width, float16),
    ]
    stored = [proto for name, proto in weights.protos.items() if name in used]
    graph = helper.make_graph(nodes.protos, "decoder", inputs, outputs, stored, value_info=nodes.shapes)
    return as_model(graph)


class _Decoder:
    """Appends the whole decoder; layers share the rows of the rotary tables."""

    def __init__(self, nodes: StaticNodes, shape: StaticShape, positions: int, context: int) -> None:
        self._nodes = nodes
        self._shape = shape
        self._positions = positions
        self._context = context
        self._angles: dict[Rope, tuple[str, str]] = {}
        self._query_scales: str | None = None

    def append(self) -> None:
        nodes, config = self._nodes, self._nodes.config
        weight_format = nodes.plan[embedding_layout(config).name]
        table = nodes.weights.embedding(weight_format, config.vocab_size, config.hidden_size)
        embedded = nodes.add("Gather", [table, "input_ids"], "embedded", axis=0)
        residual = nodes.scaled(embedded, config.embedding_scale, "", "embedded.scaled")
        layers = [layer_layout(config, index) for index in range(config.layers)]
        first = layers[0].before_attention
        normed = residual if first is None else nodes.norm(residual, first, "layers.0.input_norm")
        for index, layer in enumerate(layers):
            last = index == config.layers - 1
            projected = nodes.linear(layer.output, self._attention(index, layer, normed))
            if last and self._shape.logit_rows != nodes.width:
                # Nothing after this point mixes positions, so those without logits are dropped here.
                projected = nodes.add("Gather", [projected, LOGIT_ROWS], "asked.projected", axis=1)
                residual = nodes.add("Gather", [residual, LOGIT_ROWS], "asked.residual", axis=1)
                nodes.rows = self._shape.logit_rows
            next_norm = final_norm(config) if last else layers[index + 1].before_attention
            normed, residual = append_second_half(nodes, index, layer, projected, residual, next_norm)
        self._head(normed)

    def _attention(self, index: int, layer: Layer, normed: str) -> str:
        """Append the attention of a layer without its output projection; returns [1, W, heads * head_dim]."""
        nodes, config, name = self._nodes, self._nodes.config, f"layers.{index}"
        settings = config.attention[index]
        parts = [f"{name}.query", f"{name}.key", f"{name}.value"]
        fused = nodes.linear(layer.qkv, normed)
        widths = nodes.integers("", config.query_width, config.kv_width, config.kv_width)
        query, key, value = nodes.split(fused, parts, widths)
        (past_key, past_value), (new_key, new_value) = (
            names(index) for names in (inputs_outputs.past_cache, inputs_outputs.present_cache)
        )
        query = self._heads(query, config.heads, layer.query_norm, settings.rope, f"{query}.heads")
        query = self._grown(query, f"{name}.grown")
        self._heads(key, config.kv_heads, layer.key_norm, settings.rope, new_key)
        self._heads(value, config.kv_heads, None, None, new_value)
        keys = nodes.add("Concat", [past_key, new_key], f"{name}.keys", axis=2)
        values = nodes.add("Concat", [past_value, new_value], f"{name}.values", axis=2)
        # The scores may overflow in float16 unless queries are scaled before.
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        query = nodes.scaled(query, scale, "", f"{name}.scaled")
        group = config.heads // config.kv_heads
        grouped = nodes.reshape(query, [1, config.kv_heads, group * nodes.width, config.head_dim], f"{name}.grouped")
        transposed = nodes.transpose(keys, [0, 1, 3, 2], f"{name}.transposed")
        scores = nodes.add("MatMul", [grouped, transposed], f"{name}.scores")
        slots = self._shape.capacity + nodes.width
        by_head = nodes.reshape(scores, [1, config.heads, nodes.width, slots], f"{name}.by_head")
        capped = self._capped(by_head, config.attention_softcap, f"{name}.capped")
        masked = nodes.add("Add", [capped, mask_name(settings.window)], f"{name}.masked")
        probs = nodes.add("Softmax", [masked], f"{name}.probs", axis=-1)
        regrouped = nodes.reshape(probs, [1, config.kv_heads, group * nodes.width, slots], f"{name}.regrouped")
        attended = nodes.add("MatMul", [regrouped, values], f"{name}.attended")
        heads = nodes.reshape(attended, [1, config.heads, nodes.width, config.head_dim], f"{name}.attended.heads")
        tokens = nodes.transpose(heads, [0, 2, 1, 3], f"{name}.attended.tokens")
        return nodes.reshape(tokens, [1, nodes.width, config.query_width], f"{name}.joined")

    def _heads(self, value: str, count: int, norm: Norm | None, rope: Rope | None, output: str) -> str:
        """Split `value` [1, W, channels] into heads, norm and rotate them; returns [1, heads, W, head_dim]."""
        nodes, config = self._nodes, self._nodes.config
        if norm is not None and config.traits.head_norm == "whole":
            value = nodes.norm(value, norm, f"{value}.normed")
        elif norm is not None:
            # QNN's HTP backend norms wrongly over several heads and tokens in four dimensions, so there are three.
            rows = nodes.width * count
            flat = nodes.reshape(value, [1, rows, config.head_dim], f"{value}.flat")
            value = nodes.norm(flat, norm, f"{value}.normed", rows)
        by_token = nodes.reshape(value, [1, nodes.width, count, config.head_dim], f"{value}.by_token")
        heads = nodes.transpose(by_token, [0, 2, 1, 3], output if rope is None else f"{value}.unrotated")
        return heads if rope is None else self._rotate(heads, rope, output)

    def _grown(self, query: str, output: str) -> str:
        """Append the growth of queries [1, heads, W, head_dim] with their position, if they have one here."""
        nodes, scaling = self._nodes, self._nodes.config.query_scaling
        if scaling is None or self._positions <= scaling.original_positions:
            return query
        if self._query_scales is None:
            stored = nodes.weights.constant("query.factors", scaling.table(self._positions), half=True)
            rows = nodes.add("Gather", [stored, "position_ids"], "query.factors.rows", axis=0)
            self._query_scales = nodes.reshape(rows, [1, 1, nodes.width, 1], "query.scales")
        return nodes.add("Mul", [query, self._query_scales], output)

    def _rotate(self, heads: str, rope: Rope, output: str) -> str:
        """Append the rotation of channel pairs (i, i + n/2): x * cosines + (-second half, first half) * sines.

        The tables have the signs.
        """
        nodes, config = self._nodes, self._nodes.config
        rotated, rest = config.rotated_channels, config.head_dim - config.rotated_channels
        cosines, sines = self._rows(rope)
        half = rotated // 2
        parts = [f"{heads}.first", f"{heads}.second", *([f"{heads}.rest"] if rest else [])]
        first, second, *others = nodes.split(heads, parts, nodes.integers("", half, half, *([rest] if rest else [])))
        swapped = nodes.add("Concat", [second, first], f"{heads}.swapped", axis=-1)
        whole = nodes.add("Concat", [first, second], f"{heads}.whole", axis=-1) if rest else heads
        left = nodes.add("Mul", [whole, cosines], f"{heads}.cosines")
        right = nodes.add("Mul", [swapped, sines], f"{heads}.sines")
        if not rest:
            return nodes.add("Add", [left, right], output)
        turned = nodes.add("Add", [left, right], f"{heads}.turned")
        return nodes.add("Concat", [turned, *others], output, axis=-1)

    def _rows(self, rope: Rope) -> tuple[str, str]:
        """Cosines and sines of the new tokens, each [1, 1, W, rotated channels], gathered once per graph."""
        if rope not in self._angles:
            nodes, config = self._nodes, self._nodes.config
            name = f"rope.{len(self._angles)}"
            cosines, sines = rope.table(config.rotated_channels, self._context)
            shape = [1, 1, nodes.width, config.rotated_channels]
            rows = []
            for part, first, second in (("cos", cosines, cosines), ("sin", -sines, sines)):
                table = np.concatenate([first, second], axis=1)[: self._positions]
                stored = nodes.weights.constant(f"{name}.{part}", table, half=True)
                gathered = nodes.add("Gather", [stored, "position_ids"], f"{name}.{part}.rows", axis=0)
                rows.append(nodes.reshape(gathered, shape, f"{name}.{part}.all_heads"))
            self._angles[rope] = (rows[0], rows[1])
        return self._angles[rope]

    def _capped(self, value: str, cap: float | None, output: str) -> str:
        """Append cap * tanh(value / cap), if there is a cap."""
        if cap is None:
            return value
        nodes = self._nodes
        tanh = nodes.add("Tanh", [nodes.scaled(value, 1 / cap, "", f"{output}.divided")], f"{output}.tanh")
        return nodes.scaled(tanh, cap, "", output)

    def _head(self, normed: str) -> None:
        """Append logits [R, vocabulary] and the id of the largest logit of each of the R tokens."""
        nodes, config = self._nodes, self._nodes.config
        linear, cap, rows = head_layout(config), config.logits_softcap, self._shape.logit_rows
        hidden = nodes.scaled(normed, config.logits_scale, "", "head.scaled")
        weight_format = nodes.plan[linear.name]
        output = inputs_outputs.LOGITS if cap is None else "head.uncapped"
        if nodes.weights.integers is not None:
            nodes.integer_product(nodes.weights.integers, linear, hidden, "head.product")
            nodes.reshape("head.product", [rows, config.vocab_size], output)
        elif weight_format.bits == 32:
            table = "embedding.weight" if config.tied_head else nodes.weights.float16("head.weight")
            flat = nodes.reshape(hidden, [rows, config.hidden_size], "head.rows")
            nodes.add("Gemm", [flat, table], output, transB=1)
        else:
            matrix = embedding_layout(config).name if config.tied_head else linear.name
            product = nodes.quantized(matrix, weight_format, hidden, config.hidden_size, "head.product")
            nodes.reshape(product, [rows, config.vocab_size], output)
        if cap is not None:
            self._capped(output, cap, inputs_outputs.LOGITS)
        best = nodes.add("ArgMax", [inputs_outputs.LOGITS], f"{NEXT_IDS}.int64", axis=-1, keepdims=0)
        nodes.add("Cast", [best], NEXT_IDS, to=TensorProto.INT32)


def write_static_graphs(
    folder: Path, content: BundleContent, model: ModelProto, progress: Progress
) -> tuple[tuple[VariantFile, ...], FileDigest, str]:
    """Write the static graphs of a bundle and their data file, and compare those in float16 with model.onnx.

    Args:
        folder: the bundle's folder, which has the data file of model.onnx.
        content: the model that was exported, with the sizes of the graphs.
        model: model.onnx, whose accuracy levels are changed.
        progress: receives the stages.

    Returns:
        The graphs, for the manifest; the digest of `NPU_WEIGHTS_NAME`, the data file that they share; and what was
        written, for the user.

    Raises:
        CheckpointError: a tensor cannot be read.
        ExportError: a graph does not compute what model.onnx does.
        OSError: the disk refused a read or a write.
    """
    shapes = content.static_shapes
    positions = min(content.context, max(shape.capacity + shape.width for shape in shapes))
    with WeightFile(folder / NPU_WEIGHTS_NAME) as data:
        weights = NpuWeights(model.graph.initializer, folder, content.source, data, content.integer_linears)
        for number, shape in enumerate(shapes, 1):
            graph = build_static_graph(content.config, content.plan, weights, shape, positions, content.context)
            (folder / shape.file).write_bytes(graph.SerializeToString())
            progress(_STAGE, number / len(shapes))
        digest = data.digest()
    if content.integer_linears is None:
        _check(folder, content.config.vocab_size, model, _checked(shapes), progress)
    variants = tuple(
        VariantFile(DeviceKind.NPU, shape.file, Precision.FLOAT16, shape.width, shape.capacity) for shape in shapes
    )
    widths, contexts = (
        ", ".join(map(str, sorted({getattr(each, name) for each in variants}))) for name in ("width", "context")
    )
    note = (
        f"{len(variants)} graphs for NPUs, of widths {widths} and contexts {contexts}: "
        f"{digest.bytes / 1e6:.1f} MB beside the shared weights, "
        f"of which {weights.embedding_bytes / 1e6:.1f} MB are the embedding in float16"
    )
    return variants, digest, note


def _checked(shapes: Sequence[StaticShape]) -> list[StaticShape]:
    """Every width at the shortest context, and the narrowest at the longest: other graphs differ in sizes alone."""
    shortest, longest = shapes[0].capacity, shapes[-1].capacity
    checked = [shape for shape in shapes if shape.capacity == shortest]
    return checked if longest == shortest else [*checked, StaticShape(shapes[0].width, longest)]


def static_logits(folder: Path, shape: StaticShape) -> Callable[[TokenArray], npt.NDArray[np.float32]]:
    """Load a static graph on the CPU.

    Returns:
        What computes the logits of token ids, int64 [n]: those of all tokens, or of the last one of each pass where the
        graph gives the logits of one, float32 [r, vocabulary]. It raises EdgeError where ONNX Runtime fails.

    Raises:
        ExportError: ONNX Runtime cannot load it.
    """
    path, width = folder / shape.file, shape.width
    with export_errors(f"ONNX Runtime cannot load {path.name}"):
        session = load_session(str(path), session_options())
    graph_io = static_graph_io(session, Bundle(folder, path, None), str(path))
    runner = StaticSession(session, graph_io, width, shape.capacity)

    def logits(tokens: TokenArray) -> npt.NDArray[np.float32]:
        cache, nothing, found = StackedBuffers(graph_io.tensor_types, shape.capacity), np.zeros(0, np.int64), []
        for start in range(0, len(tokens), width):
            part = tokens[start : start + width]
            places, causal = np.arange(start, start + len(part)), np.tri(len(part), dtype=np.bool_)
            wanted = range(len(part))[-shape.logit_rows :]
            rows, _ = runner.run(cache, start, part, places, causal, nothing, wanted, logits=True)
            found.append(rows.astype(np.float32))
        return np.concatenate(found)

    return logits


def _check(folder: Path, vocabulary: int, model: ModelProto, shapes: Sequence[StaticShape], progress: Progress) -> None:
    """Compare static graphs on random tokens with model.onnx, whose accuracy levels are changed.

    Raises:
        ExportError: a graph differs by more than `TOLERANCE`.
    """
    count = min(_CHECKED_TOKENS, shapes[0].capacity)
    tokens = np.random.default_rng(0).integers(0, vocabulary, count)
    contract = ContractSession(folder, count, with_float_activations(model))
    expected = contract.forward(tokens, np.arange(count)).astype(np.float64)
    for number, shape in enumerate(shapes, 1):
        ends = [min(start + shape.width, count) - 1 for start in range(0, count, shape.width)]
        require_close(
            static_logits(folder, shape)(tokens),
            expected if shape.logit_rows == shape.width else expected[ends],
            f"{shape.file} differs from model.onnx",
            "the model may need more range than float16 has: leave --device npu out, and report the checkpoint",
            TOLERANCE * float(expected.std()),
        )
        progress(_CHECK_STAGE, number / len(shapes))
