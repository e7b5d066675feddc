"""The numbers of an upgraded graph for its manifest, read off the graph itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ...models.manifest import Architecture, WeightFormat
from .contract_inputs import AttentionForm
from .decoder_io import TOKENS, look_up_by
from .edit.editable import EditableGraph, Node
from .edit.tensors import Source, Tensor
from .selected_logits import find_lm_head

_ATTENTION: Final = "GroupQueryAttention"
_WEIGHT_INPUTS: Final[Mapping[str, int]] = {
    "MatMul": 1,
    "Gemm": 1,
    "MatMulNBits": 1,
    "MatMulBnb4": 1,
    "MatMulInteger": 1,
    "DynamicQuantizeMatMul": 1,
    "MatMulIntegerToFloat": 1,
    "QMoE": 2,
    "MoE": 2,
    "Gather": 0,
    "GatherBlockQuantized": 0,
}
"""Operators that read a weight matrix, and where."""
_ZERO_POINTS: Final = 3
"""Which input of MatMulNBits they are."""


@dataclass(frozen=True)
class FusedLinear:
    """One matrix of the model."""

    name: str
    """As in `Manifest.weights`."""
    format: WeightFormat
    rows: int
    columns: int
    stored: Mapping[Source, int]
    """Bytes by where they lie: of codes, scales and zero points."""


def fused_linears(graph: EditableGraph, logits: str) -> list[FusedLinear]:
    """Every matrix by which states are multiplied, and the embedding.

    Those of a layer are told apart by their place: what leads to an attention is its `qkv`; of those behind it the
    first is `o`, the last `down` and the rest `gate_up`.
    """
    head, embedding = find_lm_head(graph, logits), look_up_by(graph, TOKENS)
    after: dict[str, int] = {}
    """How many attentions a value comes after."""
    layers: defaultdict[int, list[Node]] = defaultdict(list)
    linears = []
    for node in graph.in_order():
        depth = max((after.get(name, 0) for name in node.inputs), default=0)
        after.update(dict.fromkeys(node.outputs, depth + (node.op == _ATTENTION)))
        matrix = _matrix(graph, node)
        if matrix is None:
            continue
        if node is head:
            linears.append(_linear_of(graph, node, "head", matrix))
        elif node is embedding:
            linears.append(_linear_of(graph, node, "embedding", matrix))
        elif node.op.startswith("Gather"):
            continue  # positions, or cosines and sines
        elif _leads_to_attention(graph, node):
            linears.append(_linear_of(graph, node, f"layers.{depth}.qkv", matrix))
        elif depth:
            layers[depth - 1].append(node)
    for layer, nodes in layers.items():
        for index, node in enumerate(nodes):
            matrix = _matrix(graph, node)
            part = "o" if index == 0 else "down" if index == len(nodes) - 1 else "gate_up"
            if matrix is not None:
                linears.append(_linear_of(graph, node, f"layers.{layer}.{part}", matrix))
    return linears


def formats_of(linears: list[FusedLinear]) -> dict[str, WeightFormat]:
    """Format by unit; of one that consists of several matrices, that of the largest."""
    largest: dict[str, FusedLinear] = {}
    for linear in linears:
        if (
            linear.name not in largest
            or linear.rows * linear.columns > largest[linear.name].rows * largest[linear.name].columns
        ):
            largest[linear.name] = linear
    formats = {name: linear.format for name, linear in largest.items()}
    return {**formats, "embedding": formats.get("embedding", formats["head"])}


def bits_per_weight(linears: list[FusedLinear]) -> float:
    """Stored bits over weights; what several units share counts once."""
    stored: dict[Source, int] = {}
    weights: dict[Source, int] = {}
    for linear in linears:
        stored |= linear.stored
        weights[next(iter(linear.stored))] = linear.rows * linear.columns
    return 8 * sum(stored.values()) / sum(weights.values())


def architecture_of(
    linears: list[FusedLinear], form: AttentionForm, family: str, context: int, intermediate_size: int | None
) -> Architecture:
    """The model's numbers."""
    head = next(linear for linear in linears if linear.name == "head")
    embedding = next((linear for linear in linears if linear.name == "embedding"), head)
    widths = [linear.columns for linear in linears if linear.name.endswith(".down")]
    return Architecture(
        family=family,
        vocab_size=min(head.rows, embedding.rows),
        hidden_size=head.columns,
        intermediate_size=intermediate_size or max(widths, default=head.columns),
        layers=form.layers,
        heads=form.heads,
        kv_heads=form.kv_heads,
        head_dim=form.head_dim,
        context=context,
        tied_head=bool(set(head.stored) & set(embedding.stored)),
    )


def _matrix(graph: EditableGraph, node: Node) -> Tensor | None:
    index = _WEIGHT_INPUTS.get(node.op)
    if index is None:
        return None
    name = node.input(index)
    while (maker := graph.producer_of(name, "Transpose", "Reshape", "DequantizeLinear", "Cast")) is not None:
        name = maker.input(0)
    tensor = graph.tensors.get(name)
    return tensor if tensor is not None and len(tensor.shape) >= 2 and min(tensor.shape) > 0 else None


def _leads_to_attention(graph: EditableGraph, node: Node) -> bool:
    """Whether an attention reads what the node makes, through operators that are no matrices and add no residual."""
    waiting, seen = [name for name in node.outputs if name], set(node.outputs)
    while waiting:
        for reader in graph.consumers(waiting.pop()):
            if reader.op == _ATTENTION:
                return True
            if _matrix(graph, reader) is None and not _adds_residual(graph, reader):
                fresh = [name for name in reader.outputs if name and name not in seen]
                seen.update(fresh)
                waiting += fresh
    return False


def _adds_residual(graph: EditableGraph, node: Node) -> bool:
    return node.op.startswith("Skip") or (node.op == "Add" and not any(name in graph.tensors for name in node.inputs))


def _linear_of(graph: EditableGraph, node: Node, name: str, matrix: Tensor) -> FusedLinear:
    """A node's matrix; scales and zero points count as stored where it is quantized."""
    bits = node.attribute("bits", node.attribute("expert_weight_bits", 4 if node.op == "MatMulBnb4" else None))
    stored = {matrix.source: matrix.nbytes}
    if bits is None:
        rows, columns = _extents(graph, node, matrix)
        return FusedLinear(name, WeightFormat(8 * matrix.nbytes // matrix.size), rows, columns, stored)
    for index in range(1, len(node.inputs)):
        tensor = graph.tensors.get(node.input(index))
        if tensor is not None and index != 5:  # a bias
            stored[tensor.source] = tensor.nbytes
    columns = node.attribute("K", matrix.size * 8 * matrix.nbytes // matrix.size // int(bits) // matrix.shape[0])
    rows = node.attribute("N", matrix.shape[0])
    points = node.op == "MatMulNBits" and bool(node.input(_ZERO_POINTS))
    form = WeightFormat(int(bits), node.attribute("block_size", 0), zero_points=points)
    return FusedLinear(name, form, rows, columns, stored)


def _extents(graph: EditableGraph, node: Node, matrix: Tensor) -> tuple[int, int]:
    """Outputs and inputs of a plain matrix, or rows and channels of a table."""
    first, last = matrix.shape[0], matrix.size // matrix.shape[0]
    turned = graph.producer_of(node.input(_WEIGHT_INPUTS[node.op]), "Transpose") is not None
    by_row = node.op.startswith("Gather") or bool(node.attribute("transB", 0))
    return (first, last) if by_row != turned else (last, first)
