"""Float linears become MatMulNBits of 4 or 8 bits, the embedding GatherBlockQuantized, a tied head the same codes."""

from __future__ import annotations

from typing import Final

import numpy as np

from ....models.manifest import WeightFormat
from ...graph.nodes import INT8_ACTIVATIONS
from ..decoder_io import TOKENS, look_up_by
from ..edit.editable import MICROSOFT, EditableGraph, Node
from ..edit.tensors import Source
from ..selected_logits import find_lm_head
from .matrices import Matrix, RoundedMatrix, matrix_of, rounded, table_of

_SMALLEST: Final = 1 << 10
"""Weights of a matrix that is worth storing in blocks; a smaller one (the routing of experts) stays as it is."""


def quantize_linears(graph: EditableGraph, logits: str, body: WeightFormat, head: WeightFormat) -> None:
    """Store the matrices of all linears in blocks; those whose format has 32 bits stay as they are.

    Args:
        graph: a decoder that computes in float32.
        logits: the value whose head is the vocabulary's.
        body: format of all linears but the head.
        head: format of the head and the embedding.

    Raises:
        BundleError: the model has no head.
    """
    last = find_lm_head(graph, logits)
    tied = _quantize_embedding(graph, head, matrix_of(graph, last)) if head.bits != 32 else None
    shared: dict[tuple[Source, bool, WeightFormat], RoundedMatrix] = {}
    for node in graph.in_order():
        form = head if node is last else body
        matrix = matrix_of(graph, node)
        if form.bits == 32 or matrix is None or matrix.tensor.size < _SMALLEST or not _is_plain(graph, node, matrix):
            continue
        if node is last and tied is not None:
            stored = tied
        else:  # layers may share their weights
            key = (matrix.tensor.source, matrix.turned, form)
            stored = shared[key] if key in shared else shared.setdefault(key, rounded(matrix, form))
        _replace(graph, node, matrix, stored)
    graph.sweep()


def _is_plain(graph: EditableGraph, node: Node, matrix: Matrix) -> bool:
    """Whether a node is its input times the matrix, plus perhaps a constant vector."""
    if node.op == "MatMul":
        return True
    bias = graph.tensors.get(node.input(2))
    fits = not node.input(2) or (bias is not None and bias.shape == (matrix.shape[0],))
    return fits and node.attribute("alpha", 1.0) == 1 and node.attribute("beta", 1.0) == 1


def _replace(graph: EditableGraph, node: Node, matrix: Matrix, stored: RoundedMatrix) -> None:
    stem = node.name or node.output(0)
    bias = node.input(2)
    inputs = [
        node.input(0),
        graph.add_tensor(f"{stem}.codes", stored.codes),
        graph.add_tensor(f"{stem}.scales", stored.scales),
        *(("", "", bias) if bias else ()),
    ]
    rows, columns = matrix.shape
    form = stored.form
    linear = graph.add(
        "MatMulNBits",
        inputs,
        name=stem,
        domain=MICROSOFT,
        N=rows,
        K=columns,
        bits=form.bits,
        block_size=form.block,
        accuracy_level=INT8_ACTIVATIONS,
    )
    graph.hand_over(node.output(0), linear.output(0))


def _quantize_embedding(graph: EditableGraph, form: WeightFormat, head: Matrix | None) -> RoundedMatrix | None:
    """Replace the look-up of the tokens' rows; returns the codes if the head is the same matrix."""
    node = look_up_by(graph, TOKENS)
    table = None if node is None else table_of(graph, node)
    if node is None or table is None:
        return None
    stored = rounded(table, form)
    rows, columns = table.shape
    blocks = stored.scales.shape[1]
    codes = graph.add_tensor("embedding.codes", stored.codes)
    scales = graph.add_tensor("embedding.scales", stored.scales.reshaped(rows, blocks, 1))
    gathered = graph.add(
        "GatherBlockQuantized",
        [codes, node.input(1), scales],
        name="embedding.blocks",
        domain=MICROSOFT,
        bits=form.bits,
        block_size=form.block,
        gather_axis=0,
        quantize_axis=2,
    )
    together = graph.add_tensor("embedding.shape", np.array([0, 0, -1], np.int64))
    value = graph.add("Reshape", [gathered.output(0), together], name="embedding").output(0)
    if columns % form.block:
        bounds = [
            graph.add_tensor(f"embedding.{name}", np.array([number], np.int64))
            for name, number in (("start", 0), ("stop", columns), ("axis", 2))
        ]
        value = graph.add("Slice", [value, *bounds], name="embedding.cut").output(0)
    graph.hand_over(node.output(0), value)
    return stored if head is not None and table.equals(head) else None
