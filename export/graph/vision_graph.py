"""The vision tower and its projector as a graph of their own, vision.onnx (docs/graph-contract.md)."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Final

import numpy as np
from onnx import GraphProto, TensorProto, helper

from ...models.bundle import VISION_GRAPH_NAME, VISION_WEIGHTS_NAME, digest_file
from ...models.manifest import FileDigest, WeightFormat
from ..architectures.vision import IDEFICS3, Projector
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import FusedLinear
from ..checkpoint.layout import tensors_of
from ..checkpoint.vision_config import VisionConfig
from .decoder import as_model
from .initializers import Initializers, WeightFile
from .nodes import MICROSOFT, Nodes

PIXELS: Final = "pixel_values"
FEATURES: Final = "image_features"


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
        tower = _Tower(nodes, vision)
        tower.append()
        declare, side = helper.make_tensor_value_info, vision.side * vision.patch_size
        graph = GraphProto(
            name="vision",
            node=[*weights.conversions, *nodes.protos],
            initializer=weights.protos,
            input=[declare(PIXELS, TensorProto.FLOAT, ["T", 3, side, side])],
            output=[declare(FEATURES, TensorProto.FLOAT, [1, "N", vision.output_size])],
        )
        digest = data.digest()
    (folder / VISION_GRAPH_NAME).write_bytes(as_model(graph).SerializeToString())
    return {VISION_GRAPH_NAME: digest_file(folder / VISION_GRAPH_NAME), VISION_WEIGHTS_NAME: digest}


class _Tower:
    """Appends a tower and its projector to a graph."""

    def __init__(self, nodes: Nodes, vision: VisionConfig) -> None:
        self._nodes = nodes
        self._vision = vision

    def append(self) -> None:
        """Append everything between pixels and features."""
        nodes, vision = self._nodes, self._vision
        states = self._patches()
        for index in range(vision.layers):
            states = self._layer(index, states)
        match vision.family.projector:
            case Projector.PIXEL_SHUFFLE:
                tokens = self._pixel_shuffle(self._norm(f"{vision.tower}.post_layernorm", states, "normed"))
            case Projector.AVERAGE_POOL:
                tokens = self._average_pool(self._norm(f"{vision.tower}.post_layernorm", states, "normed"))
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
        attended = nodes.add("MultiHeadAttention", parts, f"{name}.attended", MICROSOFT, num_heads=vision.heads)
        output = self._linear(f"{name}.o", module, (family.output,), (hidden,), hidden, attended)
        states = nodes.add("Add", [states, output], f"{name}.attention_sum")
        normed = self._norm(f"{module}.{family.norms[1]}", states, f"{name}.mlp_norm")
        inner = self._linear(f"{name}.up", module, family.mlp[:1], (wide,), hidden, normed)
        activated = nodes.add("Gelu", [inner], f"{name}.gelu", approximate=vision.gelu)
        output = self._linear(f"{name}.down", module, family.mlp[1:], (hidden,), wide, activated)
        return nodes.add("Add", [states, output], f"{name}.sum")

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
        name = f"{vision.projector}.mm_soft_emb_norm.weight"
        vision.source.require(name, (hidden,))
        factors = nodes.weights.vector("pooled_norm.weight", [name], plus=1.0)
        normed = nodes.norm_by(pooled, factors, "pooled_norm", epsilon=vision.epsilon)
        matrix = self._tensor(f"{vision.projector}.mm_input_projection_weight", (hidden, vision.output_size))
        return nodes.add("MatMul", [normed, matrix], "projector")

    def _norm(self, module: str, value: str, output: str) -> str:
        """Append a layer norm over the last axis."""
        parts = [self._tensor(f"{module}.{part}", (self._vision.hidden_size,)) for part in ("weight", "bias")]
        epsilon = self._vision.epsilon
        return self._nodes.add("LayerNormalization", [value, *parts], output, axis=-1, epsilon=epsilon)

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
        modules = tuple(f"{module}.{part}" for part in parts)
        linear = FusedLinear(name, modules, rows if len(parts) == len(rows) else (sum(rows),), columns, biased)
        for tensor, shape in tensors_of([linear]):
            self._vision.source.require(tensor, shape)
        return self._nodes.linear(linear, value)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> str:
        """Add a tensor of the checkpoint in float32, under its own name."""
        self._vision.source.require(name, shape)
        return self._nodes.weights.vector(name, [name])


def _idefics3_positions(side: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Which position embedding each patch of a square image has, rounded as `Idefics3VisionEmbeddings` rounds."""
    boundaries = np.arange(1, side, dtype=np.float64) / side
    coordinates = np.minimum(np.arange(side, dtype=np.float32) * np.float32(1 / side), np.float32(1 - 1e-6))
    buckets = np.searchsorted(boundaries.astype(np.float32), coordinates, side="right")
    return np.asarray((buckets[:, None] * side + buckets).reshape(-1), np.int64)
