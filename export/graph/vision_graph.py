"""The vision tower and its projector as a graph of their own, vision.onnx (docs/graph-contract.md)."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Final

import numpy as np
from onnx import TensorProto, helper

from ...models.bundle import VISION_GRAPH_NAME, VISION_WEIGHTS_NAME, digest_file
from ...models.manifest import FileDigest, WeightFormat
from ..architectures.vision import IDEFICS3, Projector
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layout import fused, tensors_of
from ..checkpoint.vision_config import VisionConfig
from .decoder import as_model
from .initializers import Initializers, WeightFile
from .nodes import MICROSOFT, Nodes

PIXELS: Final = "pixel_values"
FEATURES: Final = "image_features"
POSITIONS: Final = "patch_positions"
WINDOWS: Final = "windows"
WINDOW_SLOTS: Final = "window_slots"
AXIS_WEIGHTS: Final = {"row_weights": "H", "column_weights": "C"}
"""Inputs with the shares of learned positions in the rows and the columns of an image, and their sizes."""


def write_vision(
    folder: Path, vision: VisionConfig, decoder: DecoderConfig, weight_format: WeightFormat
) -> dict[str, FileDigest]:
    """Write graph and weights of a vision tower into a folder; returns their digests by file name.

    Raises:
        CheckpointError: a tensor is missing or has another shape, or cannot be read.
        OSError: the disk refused a write.
    """
    with WeightFile(folder / VISION_WEIGHTS_NAME) as data:
        weights = Initializers(vision.source, data, lambda _: None)
        nodes = Nodes(decoder, defaultdict(lambda: weight_format), weights)
        is_native = vision.family.projector is Projector.PATCH_MERGER
        tower = (_NativeTower if is_native else _Tower)(nodes, vision)
        tower.append()
        inputs, declare = tower.inputs(), helper.make_tensor_value_info
        output = declare(FEATURES, TensorProto.FLOAT, [1 + len(vision.deepstack), "N", vision.output_size])
        graph = helper.make_graph(nodes.all(), "vision", [declare(*each) for each in inputs], [output], weights.protos)
        digest = data.digest()
    (folder / VISION_GRAPH_NAME).write_bytes(as_model(graph).SerializeToString())
    return {VISION_GRAPH_NAME: digest_file(folder / VISION_GRAPH_NAME), VISION_WEIGHTS_NAME: digest}


class _Tower:
    """Appends a tower and its projector to a graph."""

    def __init__(self, nodes: Nodes, vision: VisionConfig) -> None:
        self._nodes = nodes
        self._vision = vision

    def inputs(self) -> list[tuple[str, int, list[int | str]]]:
        """Names, types and shapes of the inputs."""
        side = self._vision.side * self._vision.patch_size
        return [(PIXELS, TensorProto.FLOAT, ["T", 3, side, side])]

    def append(self) -> None:
        """Append everything between pixels and features."""
        nodes, vision = self._nodes, self._vision
        states = self._patches()
        for index in range(vision.layers):
            states = self._layer(index, states)
        merged = self._pixel_shuffle if vision.family.projector is Projector.PIXEL_SHUFFLE else self._average_pool
        tokens = merged(self._norm(f"{vision.tower}.post_layernorm", states, "normed"))
        nodes.add("Reshape", [tokens, nodes.integers("features.shape", 1, -1, vision.output_size)], FEATURES)

    def _patches(self) -> str:
        """The embedded patches of square images with their positions, [T, patches, hidden]."""
        nodes, vision, module = self._nodes, self._vision, f"{self._vision.tower}.embeddings"
        size, hidden, count = vision.patch_size, vision.hidden_size, vision.side**2
        kernel = self._tensor(f"{module}.patch_embedding.weight", (hidden, 3, size, size))
        bias = self._tensor(f"{module}.patch_embedding.bias", (hidden,))
        convolved = nodes.add("Conv", [PIXELS, kernel, bias], "patches", strides=[size, size])
        flat = nodes.add("Reshape", [convolved, nodes.integers("patches.shape", 0, hidden, count)], "patches.flat")
        embedded = nodes.add("Transpose", [flat], "patches.embedded", perm=[0, 2, 1])
        name = f"{module}.position_embedding.weight"
        vision.source.require(name, (count, hidden))
        order = _idefics3_positions(vision.side) if vision.family is IDEFICS3 else np.arange(count)
        positions = nodes.constant("positions", vision.source.read(name)[order][None])
        return nodes.add("Add", [embedded, positions], "embedded")

    def _layer(self, index: int, states: str) -> str:
        """Append a layer; returns the name of [T, patches, hidden]."""
        nodes, vision, family = self._nodes, self._vision, self._vision.family
        module, name = f"{vision.tower}.{family.layers}.{index}", f"vision.{index}"
        hidden, wide = vision.hidden_size, vision.intermediate_size
        normed = self._norm(f"{module}.{family.norms[0]}", states, f"{name}.attention_norm")
        parts = [f"{name}.{part}" for part in ("query", "key", "value")]
        packed = self._linear(f"{name}.qkv", module, family.qkv, (hidden,) * 3, hidden, normed)
        nodes.split(packed, parts, nodes.integers("heads.widths", hidden, hidden, hidden))
        attended = self._attend(index, parts, f"{name}.attended")
        output = self._linear(f"{name}.o", module, (family.output,), (hidden,), hidden, attended)
        states = nodes.add("Add", [states, output], f"{name}.attention_sum")
        normed = self._norm(f"{module}.{family.norms[1]}", states, f"{name}.mlp_norm")
        *first, last = family.mlp
        inner = self._linear(f"{name}.up", module, tuple(first), (wide,) * len(first), hidden, normed)
        if len(first) == 1:
            inner = self._activated(inner, f"{name}.gelu")
        else:
            gate, up = nodes.split(inner, [f"{name}.gate", f"{name}.inner"], nodes.integers("mlp.widths", wide, wide))
            inner = nodes.add("Mul", [self._activated(gate, f"{name}.opened"), up], f"{name}.gated")
        output = self._linear(f"{name}.down", module, (last,), (hidden,), wide, inner)
        return nodes.add("Add", [states, output], f"{name}.sum")

    def _attend(self, index: int, parts: list[str], name: str) -> str:  # noqa: ARG002 -- native towers have layers that differ
        """Append the attention of queries, keys and values to each other."""
        return self._nodes.add("MultiHeadAttention", parts, name, MICROSOFT, num_heads=self._vision.heads)

    def _activated(self, value: str, output: str) -> str:
        if self._vision.activation == "silu":
            return self._nodes.silu(value, output)
        return self._nodes.add("Gelu", [value], output, approximate=self._vision.activation)

    def _pixel_shuffle(self, states: str) -> str:
        """The channels of squares of patches side by side, then a linear; Idefics3's `pixel_shuffle`."""
        nodes, vision = self._nodes, self._vision
        size, squares, hidden = vision.merged, vision.side // vision.merged, vision.hidden_size
        apart = nodes.integers("squares.shape", -1, squares, size, squares, size * hidden)
        grid = nodes.add("Reshape", [states, apart], "squares")
        by_square = nodes.add("Transpose", [grid], "squares.together", perm=[0, 1, 3, 2, 4])
        width = size * size * hidden
        joined = nodes.integers("squares.joined", -1, squares * squares, width)
        tokens = nodes.add("Reshape", [by_square, joined], "squares.tokens")
        module = f"{vision.projector}.modality_projection"
        return self._linear("projector", module, ("proj",), (vision.output_size,), width, tokens, biased=False)

    def _average_pool(self, states: str) -> str:
        """The mean of squares of patches, an RMS norm and a matrix."""
        nodes, vision = self._nodes, self._vision
        size, squares, hidden = vision.merged, vision.side // vision.merged, vision.hidden_size
        apart = nodes.integers("squares.shape", -1, squares, size, squares, size, hidden)
        grid = nodes.add("Reshape", [states, apart], "squares")
        axes = nodes.integers("squares.axes", 2, 4)
        pooled = nodes.add("ReduceMean", [grid, axes], "pooled", keepdims=0)
        factors = self._tensor(f"{vision.projector}.mm_soft_emb_norm.weight", (hidden,), plus=1.0)
        normed = nodes.norm_by(pooled, factors, "pooled_norm", epsilon=vision.epsilon)
        matrix = self._tensor(f"{vision.projector}.mm_input_projection_weight", (hidden, vision.output_size))
        return nodes.add("MatMul", [normed, matrix], "projector")

    def _norm(self, module: str, value: str, output: str, width: int | None = None) -> str:
        """Append a norm over the last axis, of the hidden channels unless `width` says otherwise."""
        vision, shape = self._vision, (width or self._vision.hidden_size,)
        weight = self._tensor(f"{module}.weight", shape)
        if vision.family.rms_norms:
            return self._nodes.norm_by(value, weight, output, vision.epsilon)
        parts = [value, weight, self._tensor(f"{module}.bias", shape)]
        return self._nodes.add("LayerNormalization", parts, output, axis=-1, epsilon=vision.epsilon)

    def _linear(
        self,
        name: str,
        module: str,
        parts: tuple[str, ...],
        rows: tuple[int, ...],
        columns: int,
        value: str,
        *,
        biased: bool = True,
    ) -> str:
        """Append a linear of one or more modules."""
        linear = fused(name, module, parts, rows, columns, biased)
        for tensor, shape in tensors_of([linear]):
            self._vision.source.require(tensor, shape)
        return self._nodes.linear(linear, value)

    def _tensor(self, name: str, shape: tuple[int, ...], plus: float = 0.0) -> str:
        """Add a tensor of the checkpoint in float32, under its own name, and with `plus` added to its values."""
        self._vision.source.require(name, shape)
        return self._nodes.weights.vector(name, [name], plus)


class _NativeTower(_Tower):
    """Appends a tower over the patches of one image of any size, which come square by square as they are merged."""

    def inputs(self) -> list[tuple[str, int, list[int | str]]]:
        """Flat patches with their rows and columns, and what some towers have besides."""
        vision = self._vision
        found: list[tuple[str, int, list[int | str]]] = [
            (PIXELS, TensorProto.FLOAT, ["P", 3 * vision.frames * vision.patch_size**2]),
            (POSITIONS, TensorProto.INT64, ["P", 2]),
        ]
        if vision.full_layers is not None:
            found += [(WINDOWS, TensorProto.INT64, ["W", "S"]), (WINDOW_SLOTS, TensorProto.INT64, ["P"])]
        if vision.family.positions is not None:
            found += [(name, TensorProto.FLOAT, [size, vision.side]) for name, size in AXIS_WEIGHTS.items()]
        return found

    def append(self) -> None:
        """Append everything between patches and features."""
        nodes, vision = self._nodes, self._vision
        if not vision.family.siglip2:
            self._append_rotation()
        if vision.full_layers is not None:
            zero = nodes.constant("zero", np.array(0, np.int64))
            present = nodes.add("GreaterOrEqual", [WINDOWS, zero], "windows.present")
            nodes.add("Cast", [present], "windows.mask", to=TensorProto.INT32)
        states, features = self._patches(), []
        for index in range(vision.layers):
            states = self._layer(index, states)
            if index in vision.deepstack:
                number = vision.deepstack.index(index)
                features.append(
                    self._merged(f"{vision.tower}.deepstack_merger_list.{number}", states, merged_norm=True)
                )
        if vision.family.siglip2:
            states = self._norm(f"{vision.tower}.post_layernorm", states, "normed")
        merged = self._merged(vision.projector, states, merged_norm=vision.family.siglip2)
        nodes.add("Concat", [merged, *features], FEATURES, axis=0)

    def _patches(self) -> str:
        """The embedded patches, [1, P, hidden]."""
        nodes, vision = self._nodes, self._vision
        module, hidden = f"{vision.tower}.{vision.family.patches}", vision.hidden_size
        side, name = vision.patch_size, f"{module}.weight"
        # SigLIP 2 has a linear whose inputs are pixels with three channels each, but not in GGUF files.
        is_linear = vision.family.siglip2 and len(vision.source.shape(name)) == 2
        vision.source.require(name, (hidden, side * side * 3) if is_linear else (hidden, 3, vision.frames, side, side))
        kernel = vision.source.read(name)
        kernel = kernel.reshape(hidden, -1, 3).swapaxes(1, 2) if is_linear else kernel
        matrix = nodes.constant(name, np.ascontiguousarray(kernel.reshape(hidden, -1).T))
        embedded = nodes.add("MatMul", [PIXELS, matrix], "patches")
        if vision.family.positions is not None:
            embedded = nodes.add("Add", [embedded, self._tensor(f"{module}.bias", (hidden,))], "patches.biased")
            embedded = nodes.add("Add", [embedded, self._learned_positions()], "patches.placed")
        return nodes.add("Unsqueeze", [embedded, nodes.integers("first", 0)], "embedded")

    def _learned_positions(self) -> str:
        """The position embeddings of a square, interpolated to the rows and columns of the image, [P, hidden]."""
        nodes, side, hidden = self._nodes, self._vision.side, self._vision.hidden_size
        table = self._tensor(f"{self._vision.tower}.{self._vision.family.positions}.weight", (side * side, hidden))
        rows, columns = AXIS_WEIGHTS
        flat = nodes.add("Reshape", [table, nodes.integers("positions.flat", side, -1)], "positions.table")
        by_row = nodes.add("MatMul", [rows, flat], "positions.by_row")
        apart = nodes.add("Reshape", [by_row, nodes.integers("positions.apart", -1, side, hidden)], "positions.rows")
        grid = nodes.add("MatMul", [columns, apart], "positions.grid")
        return nodes.add("GatherND", [grid, POSITIONS], "positions")

    def _append_rotation(self) -> None:
        """Append cosines and sines [P, head / 2] of rows, then of columns."""
        nodes, vision = self._nodes, self._vision
        size = vision.hidden_size // vision.heads // 2
        frequencies = nodes.constant("frequencies", 10000.0 ** (-np.arange(0, size, 2, dtype=np.float32) / size))
        numbers = nodes.add("Cast", [POSITIONS], "places", to=TensorProto.FLOAT)
        apart = nodes.add("Unsqueeze", [numbers, nodes.integers("last.axis", -1)], "places.apart")
        angles = nodes.add("Mul", [apart, frequencies], "angles.apart")
        joined = nodes.add("Reshape", [angles, nodes.integers("angles.shape", 0, size)], "angles")
        nodes.add("Cos", [joined], "cosines")
        nodes.add("Sin", [joined], "sines")

    def _attend(self, index: int, parts: list[str], name: str) -> str:
        """Append rotation and attention, within windows in some layers."""
        nodes, vision = self._nodes, self._vision
        if vision.family.siglip2:
            return super()._attend(index, parts, name)
        first = nodes.integers("first", 0)  # as positions: the row of the first patch, where the others follow
        for place, part in enumerate(parts[:2]):
            inputs = [part, first, "cosines", "sines"]
            parts[place] = nodes.add("RotaryEmbedding", inputs, f"{part}.rotated", MICROSOFT, num_heads=vision.heads)
        if vision.full_layers is None or index in vision.full_layers:
            return super()._attend(index, parts, name)
        flat = [nodes.add("Squeeze", [part, first], f"{part}.flat") for part in parts]
        windows = [nodes.add("Gather", [part, WINDOWS], f"{part}.windows", axis=0) for part in flat]
        inputs = [*windows, "", "windows.mask"]
        attended = nodes.add("MultiHeadAttention", inputs, f"{name}.windows", MICROSOFT, num_heads=vision.heads)
        rows = nodes.add("Reshape", [attended, nodes.integers("rows", -1, vision.hidden_size)], f"{name}.rows")
        ordered = nodes.add("Gather", [rows, WINDOW_SLOTS], f"{name}.flat", axis=0)
        return nodes.add("Unsqueeze", [ordered, first], name)

    def _merged(self, module: str, states: str, *, merged_norm: bool) -> str:
        """The squares of patches as tokens, [1, N, output], normed patch by patch or together."""
        nodes, vision, (norm, *linears) = self._nodes, self._vision, self._vision.family.merger
        width, inner_size = vision.merged**2 * vision.hidden_size, vision.merged_size
        if not merged_norm:
            states = self._norm(f"{module}.{norm}", states, f"{module}.normed")
        tokens = nodes.add("Reshape", [states, nodes.integers("tokens.shape", 1, -1, width)], f"{module}.tokens")
        if merged_norm and vision.has_merger_norm:
            tokens = self._norm(f"{module}.{norm}", tokens, f"{module}.normed", width)
        inner = self._linear(f"{module}.first", module, (linears[0],), (inner_size,), width, tokens)
        inner = nodes.add("Gelu", [inner], f"{module}.gelu")
        return self._linear(f"{module}.second", module, (linears[1],), (vision.output_size,), inner_size, inner)


def _idefics3_positions(side: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Which position embedding each patch of a square image has, rounded as `Idefics3VisionEmbeddings` rounds."""
    boundaries = np.arange(1, side, dtype=np.float64) / side
    coordinates = np.minimum(np.arange(side, dtype=np.float32) * np.float32(1 / side), np.float32(1 - 1e-6))
    buckets = np.searchsorted(boundaries.astype(np.float32), coordinates, side="right")
    return np.asarray((buckets[:, None] * side + buckets).reshape(-1), np.int64)
