"""Quantizes float linears to MatMulNBits, and the embedding to GatherBlockQuantized.

A tied LM head shares the codes of the embedding.
"""

from __future__ import annotations

from typing import Final

from ....models.manifest import WeightFormat
from ..decoder_io import TOKENS, embedding_lookup
from ..edit.editable import MICROSOFT, EditableGraph, Node
from ..edit.tensors import Source
from ..selected_logits import find_lm_head
from .matrices import Matrix, RoundedMatrix, matrix_of, table_of
from .quantized_linears import quantized_linear

_MIN_WEIGHTS: Final = 1 << 10
"""Number of weights below which a matrix (such as the routing of experts) is not quantized."""


def quantize_linears(graph: EditableGraph, body: WeightFormat, head: WeightFormat) -> None:
    """Quantize the matrices of all linears, except those whose format has 32 bits.

    Args:
        graph: a decoder that computes in float32.
        body: format of all linears except the LM head.
        head: format of the LM head and the embedding.

    Raises:
        BundleError: the model has no LM head.
    """
    lm_head = find_lm_head(graph)
    tied = _quantize_embedding(graph, head, matrix_of(graph, lm_head)) if head.bits != 32 else None
    shared: dict[tuple[Source, bool, WeightFormat], RoundedMatrix] = {}
    for node in graph.in_order():
        weight_format = head if node is lm_head else body
        matrix = matrix_of(graph, node)
        if weight_format.bits == 32 or matrix is None or matrix.tensor.size < _MIN_WEIGHTS:
            continue
        if not _is_product(graph, node, matrix):
            continue
        if node is lm_head and tied is not None:
            stored = tied
        else:  # layers may share their weights
            key = (matrix.tensor.source, matrix.transposed, weight_format)
            stored = shared[key] if key in shared else shared.setdefault(key, RoundedMatrix(matrix, weight_format))
        _replace(graph, node, matrix, stored)
    graph.sweep()


def _is_product(graph: EditableGraph, node: Node, matrix: Matrix) -> bool:
    """Whether a node computes its input times the matrix, with or without a constant bias."""
    if node.op == "MatMul":
        return True
    bias = graph.tensors.get(node.input(2))
    fits = not node.input(2) or (bias is not None and bias.shape == (matrix.shape[0],))
    return fits and node.attribute("alpha", 1.0) == 1 and node.attribute("beta", 1.0) == 1


def _replace(graph: EditableGraph, node: Node, matrix: Matrix, stored: RoundedMatrix) -> None:
    bias = ("", "", node.input(2)) if node.input(2) else ()
    inputs = [node.input(0), stored.codes, stored.scales, *bias]
    name = node.name or node.output(0)
    linear = quantized_linear(graph, name, inputs, matrix.shape, stored.format.bits, stored.format.block)
    graph.replace_value(node.output(0), linear)


def _quantize_embedding(graph: EditableGraph, weight_format: WeightFormat, head: Matrix | None) -> RoundedMatrix | None:
    """Quantize the embedding; returns its codes if the LM head is the same matrix."""
    node = embedding_lookup(graph, TOKENS)
    table = None if node is None else table_of(graph, node)
    if node is None or table is None:
        return None
    stored = RoundedMatrix(table, weight_format)
    columns = table.shape[1]
    gathered = graph.value(
        "GatherBlockQuantized",
        [stored.codes, node.input(1), stored.scales.reshaped(*stored.scales.shape, 1)],
        name="embedding.blocks",
        domain=MICROSOFT,
        bits=weight_format.bits,
        block_size=weight_format.block,
        gather_axis=0,
        quantize_axis=2,
    )
    value = graph.value("Reshape", [gathered, [0, 0, -1]], name="embedding")
    if columns % weight_format.block:
        value = graph.value("Slice", [value, [0], [columns], [2]], name="embedding.cut")
    graph.replace_value(node.output(0), value)
    return stored if head is not None and table.equals(head) else None
