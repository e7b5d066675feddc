"""A model of another exporter: its graph, settings and tokenizer, and the numbers of its upgraded graph."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from onnx import TensorProto

from ...errors import BundleError
from ...models.bundle import Bundle, open_bundle
from ...models.find import find_model
from ...models.graph_files import files_below
from ...models.manifest import Architecture, WeightFormat
from ...models.variants import GENAI_CONFIG
from .contract_inputs import AttentionShape
from .decoder_io import TOKENS, embedding_lookup, find_lm_head, stored_constant
from .editable import EditableGraph, Node
from .graph_parts import Source, Tensor
from .quantized_linears import BIAS, SCALES, ZERO_POINTS

_ATTENTION: Final = "GroupQueryAttention"
_WEIGHT_INPUTS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("MatMul", "Gemm", "MatMulNBits", "MatMulBnb4", "MatMulInteger"), 1),
    **dict.fromkeys(("DynamicQuantizeMatMul", "MatMulIntegerToFloat"), 1),
    **dict.fromkeys(("QMoE", "MoE"), 2),
    **dict.fromkeys(("Gather", "GatherBlockQuantized"), 0),
}
"""Operators that read a weight matrix, and the index of that input."""
_TOKENIZER: Final = "tokenizer.json"
_GENERATION: Final = "generation_config.json"
_TOKEN_SETTINGS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")
_SAMPLING_SETTINGS: Final = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")


class WeightMatrix(NamedTuple):
    """One weight matrix of the model."""

    name: str
    """As in `Manifest.weights`."""
    format: WeightFormat
    rows: int
    columns: int
    stored: Mapping[Source, int]
    """Number of bytes of codes, scales and zero points, by where they are stored."""


def weight_matrices(graph: EditableGraph) -> list[WeightMatrix]:
    """Find every matrix that multiplies hidden states, and the embedding.

    Matrices of a layer are named by their position: what leads to an attention is its `qkv`; after an attention the
    first is `o`, the last `down` and those between `gate_up`.
    """
    head, embedding = find_lm_head(graph), embedding_lookup(graph, TOKENS)
    depths: dict[str, int] = {}
    """Number of attentions before a value."""
    after_attention: defaultdict[int, list[tuple[Node, Tensor]]] = defaultdict(list)
    matrices = []
    for node in graph.in_order():
        depth = max((depths.get(name, 0) for name in node.inputs), default=0)
        depths.update(dict.fromkeys(node.outputs, depth + (node.op == _ATTENTION)))
        weights = _weights(graph, node)
        if weights is None:
            continue
        if node is head or node is embedding:
            matrices.append(_matrix(graph, node, "head" if node is head else "embedding", weights))
        elif node.op.startswith("Gather"):
            continue  # a table of positions, cosines or sines
        elif _leads_to_attention(graph, node):
            matrices.append(_matrix(graph, node, f"layers.{depth}.qkv", weights))
        elif depth:
            after_attention[depth - 1].append((node, weights))
    for layer, linears in after_attention.items():
        for index, (node, weights) in enumerate(linears):
            part = "o" if index == 0 else "down" if index == len(linears) - 1 else "gate_up"
            matrices.append(_matrix(graph, node, f"layers.{layer}.{part}", weights))
    return matrices


def formats_of(matrices: Sequence[WeightMatrix]) -> dict[str, WeightFormat]:
    """Weight format by name; where several matrices share a name, the format of the largest."""
    formats: dict[str, WeightFormat] = {}
    for matrix in matrices:
        alike = (each for each in matrices if each.name == matrix.name)
        formats[matrix.name] = max(alike, key=lambda each: each.rows * each.columns).format
    return {**formats, "embedding": formats.get("embedding", formats["head"])}


def bits_per_weight(matrices: Sequence[WeightMatrix]) -> float:
    """Stored bits per weight; a matrix that is used several times counts once."""
    stored: dict[Source, int] = {}
    weights: dict[Source, int] = {}
    for matrix in matrices:
        stored |= matrix.stored
        weights[next(iter(matrix.stored))] = matrix.rows * matrix.columns
    return 8 * sum(stored.values()) / sum(weights.values())


def architecture_of(
    matrices: Sequence[WeightMatrix],
    attention: AttentionShape,
    family: str,
    context: int,
    intermediate_size: int | None,
) -> Architecture:
    """The architecture for the manifest."""
    head = next(matrix for matrix in matrices if matrix.name == "head")
    embedding = next((matrix for matrix in matrices if matrix.name == "embedding"), head)
    widths = [matrix.columns for matrix in matrices if matrix.name.endswith(".down")]
    return Architecture(
        family=family,
        vocab_size=min(head.rows, embedding.rows),
        hidden_size=head.columns,
        intermediate_size=intermediate_size or max(widths, default=head.columns),
        layers=attention.layers,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        context=context,
        tied_head=bool(set(head.stored) & set(embedding.stored)),
    )


def _weights(graph: EditableGraph, node: Node) -> Tensor | None:
    """The constant matrix that a node multiplies with or gathers from."""
    tensor = stored_constant(graph, node.input(_WEIGHT_INPUTS[node.op])) if node.op in _WEIGHT_INPUTS else None
    return tensor if tensor is not None and len(tensor.shape) >= 2 and min(tensor.shape) > 0 else None


def _leads_to_attention(graph: EditableGraph, node: Node) -> bool:
    """Whether an attention reads the output of a node, with no other matrix and no residual in between."""

    def goes_on(_: str, reader: Node) -> bool:
        adds = reader.op == "Add" and not any(name in graph.tensors for name in reader.inputs)
        return not adds and not reader.op.startswith("Skip") and _weights(graph, reader) is None

    return any(reader.op == _ATTENTION for _, reader in graph.readers(node.output(0), goes_on))


def _matrix(graph: EditableGraph, node: Node, name: str, weights: Tensor) -> WeightMatrix:
    """Describe the matrix of a node; for a quantized one, scales and zero points count as stored."""
    bits = node.attribute("bits", node.attribute("expert_weight_bits", 4 if node.op == "MatMulBnb4" else None))
    stored = {weights.source: weights.nbytes}
    if bits is None:
        rows, columns = weights.shape[0], weights.size // weights.shape[0]
        transposed = graph.producer_of(node.input(_WEIGHT_INPUTS[node.op]), "Transpose") is not None
        if (node.op.startswith("Gather") or bool(node.attribute("transB", 0))) == transposed:
            rows, columns = columns, rows
        return WeightMatrix(name, WeightFormat(8 * weights.nbytes // weights.size), rows, columns, stored)
    half_scales = False
    for index in range(1, len(node.inputs)):
        converted = graph.producer_of(node.input(index), "Cast")
        tensor = graph.tensors.get(node.input(index) if converted is None else converted.input(0))
        half_scales |= index == SCALES and tensor is not None and tensor.element_type == TensorProto.FLOAT16
        if tensor is not None and index != BIAS:
            stored[tensor.source] = tensor.nbytes
    columns = node.attribute("K", weights.size * 8 * weights.nbytes // weights.size // int(bits) // weights.shape[0])
    rows = node.attribute("N", weights.shape[0])
    zero_points = node.op == "MatMulNBits" and bool(node.input(ZERO_POINTS))
    block = node.attribute("block_size", 0)
    weight_format = WeightFormat(int(bits), block, zero_points=zero_points, half_scales=half_scales)
    return WeightMatrix(name, weight_format, rows, columns, stored)


def find_foreign_model(source: Path) -> Bundle:
    """Find the graph in `source`, and the folders of its settings and tokenizer.

    Args:
        source: an .onnx file, a folder, or a folder with the name of a variant (`folder:q4`).

    Raises:
        BundleError: there is no graph, no single best one, or no tokenizer with it.
    """
    bundle = open_bundle(find_model(source))
    if bundle.file(_TOKENIZER) is None:
        above = bundle.graph.parent.parent
        if not (above / _TOKENIZER).is_file():
            raise BundleError(
                f"there is no {_TOKENIZER} beside {bundle.graph}", "put the model's tokenizer and config.json beside it"
            )
        bundle = replace(bundle, tokenizer=above)
    return bundle


def holds_graph(source: Path) -> bool:
    """Whether a path is an .onnx file, or a folder that has one and no checkpoint weights.

    Raises:
        BundleError: the path names a variant that its folder does not have, or the folder has very many files.
    """
    source = find_model(source)
    if not source.is_dir():
        return source.suffix == ".onnx"
    if (source / "config.json").is_file() and any(source.glob("*.safetensors")):
        return False
    return any(name.endswith(".onnx") for name in files_below(source))


def copy_config_files(bundle: Bundle, folder: Path) -> None:
    """Copy tokenizer and config files.

    Stop tokens that only genai_config.json names are added to generation_config.json.

    Raises:
        BundleError: a settings file cannot be read.
        OSError: the disk refused a write.
    """
    bundle.copy_config_files(folder)
    generation = bundle.json_file(_GENERATION)
    if generation.get("eos_token_id") is not None or not bundle.genai:
        return
    search = bundle.json_file(GENAI_CONFIG).get("search")
    found: dict[str, Any] = {name: bundle.genai.get(name) for name in _TOKEN_SETTINGS}
    if not generation and isinstance(search, dict):
        found |= {name: search.get(name) for name in _SAMPLING_SETTINGS}
    known = {name: value for name, value in found.items() if value is not None}
    (folder / _GENERATION).write_text(json.dumps({**known, **generation}, indent=2) + "\n", encoding="utf-8")
