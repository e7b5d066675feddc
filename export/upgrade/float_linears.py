"""Quantizes float linears and the embedding, and converts half precision to float32.

A tied LM head shares the codes of the embedding. A CPU would otherwise convert every weight and value of half precision
in each pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from onnx import TensorProto, numpy_helper

from ...models.manifest import WeightFormat
from ..checkpoint.source import Float32Array, in_order
from ..graph.nodes import gather_settings, matmul_nbits_settings
from ..quantization.codes import blocks_of, nearest_rows
from .decoder_io import TOKENS, embedding_lookup, find_lm_head
from .editable import EditableGraph, Node, Operand
from .graph_parts import FLOATS, Array, Computed, Source, Tensor, unsupported

_CHUNK: Final = 1 << 22
"""Number of weights that are rounded, compared or converted at once."""
_MIN_WEIGHTS: Final = 1 << 10
"""Number of weights below which a matrix (such as the routing of experts) is not quantized."""
_HALVES: Final = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_LARGE_TABLE: Final = 1 << 20
"""Number of elements from which a table stays in half precision, and the gathered rows are converted."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """A weight matrix [N, K]: output i is the product of row i and the input."""

    tensor: Tensor
    transposed: bool
    """Whether the tensor is stored as [K, N]."""

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        first, second = self.tensor.shape
        return (second, first) if self.transposed else (first, second)

    def rows(self, start: int, stop: int) -> Float32Array:
        """Read rows `start` to `stop`, float32 [stop - start, K]."""
        stored = self.tensor.array()
        part = stored[:, start:stop].T if self.transposed else stored[start:stop]
        return np.ascontiguousarray(part, np.float32)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield start and stop of chunks of rows that are processed one by one."""
        rows, columns = self.shape
        step = max(1, _CHUNK // max(1, columns))
        for start in range(0, rows, step):
            yield start, min(start + step, rows)

    def equals(self, other: Matrix) -> bool:
        """Whether the other matrix has the same weights, stored once or twice."""
        if self.shape != other.shape:
            return False
        if self.tensor.source is other.tensor.source and self.transposed == other.transposed:
            return True
        return all(np.array_equal(self.rows(*each), other.rows(*each)) for each in self.ranges())


def matrix_of(graph: EditableGraph, node: Node) -> Matrix | None:
    """The constant matrix that a MatMul or Gemm multiplies its input with; None if there is none."""
    if node.op not in ("MatMul", "Gemm") or node.domain or node.attribute("transA", 0):
        return None
    found = _read(graph, node.input(1))
    return None if found is None else Matrix(found.tensor, bool(node.attribute("transB", 0)) == found.transposed)


def table_of(graph: EditableGraph, node: Node) -> Matrix | None:
    """The constant matrix whose rows a Gather looks up; None if there is none."""
    return _read(graph, node.input(0)) if node.op == "Gather" and node.attribute("axis", 0) == 0 else None


def _read(graph: EditableGraph, name: str) -> Matrix | None:
    """A constant float matrix, possibly read through a Transpose."""
    transpose = graph.producer_of(name, "Transpose")
    tensor = graph.tensors.get(name if transpose is None else transpose.input(0))
    if tensor is None or len(tensor.shape) != 2 or tensor.element_type not in FLOATS:
        return None
    if isinstance(tensor.source, Computed) and tensor.source.widens is not None:
        tensor = replace(tensor.source.widens, shape=tensor.shape)  # to avoid a whole float32 copy
    return Matrix(tensor, transposed=transpose is not None)


def rounded(matrix: Matrix, weight_format: WeightFormat) -> tuple[Tensor, Tensor]:
    """A matrix rounded to nearest in blocks along K (see `quantization.codes`), which is computed when it is written.

    Returns:
        Codes, uint8 [N, blocks, block * bits / 8], and scales, float32 [N, blocks]. The matrix is rounded only once for
        both if the codes are read first.
    """
    shape = matrix.shape[0], blocks_of(matrix.shape[1], weight_format)
    found: list[Float32Array] = []

    def codes() -> Iterator[Array]:
        found.clear()
        for part in in_order(lambda part: nearest_rows(matrix.rows(*part), weight_format), matrix.ranges()):
            found.append(part.scales)
            yield part.packed

    def scales() -> Iterator[Array]:
        if not found:
            deque(codes(), 0)
        yield from found

    block_bytes = weight_format.block * weight_format.bits // 8
    return Tensor.computed(np.uint8, (*shape, block_bytes), codes), Tensor.computed(np.float32, shape, scales)


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
    shared: dict[tuple[Source, bool, WeightFormat], tuple[Tensor, Tensor]] = {}
    for node in graph.in_order():
        weight_format = head if node is lm_head else body
        matrix = matrix_of(graph, node)
        if weight_format.bits == 32 or matrix is None or matrix.tensor.size < _MIN_WEIGHTS:
            continue
        if not _is_product(graph, node, matrix):
            continue
        key = (matrix.tensor.source, matrix.transposed, weight_format)  # layers may share their weights
        stored = tied if node is lm_head and tied is not None else shared.get(key)
        if stored is None:
            stored = shared[key] = rounded(matrix, weight_format)
        inputs = [node.input(0), *stored, *(("", "", node.input(2)) if node.input(2) else ())]
        settings = matmul_nbits_settings(matrix.shape, weight_format.bits, weight_format.block)
        linear = graph.value("MatMulNBits", inputs, name=node.name or node.output(0), **settings)
        graph.replace_value(node.output(0), linear)
    graph.sweep()


def _is_product(graph: EditableGraph, node: Node, matrix: Matrix) -> bool:
    """Whether a node computes its input times the matrix, with or without a constant bias."""
    if node.op == "MatMul":
        return True
    bias = graph.tensors.get(node.input(2))
    fits = not node.input(2) or (bias is not None and bias.shape == (matrix.shape[0],))
    return fits and is_unscaled(node)


def is_unscaled(gemm: Node) -> bool:
    """Whether a Gemm multiplies neither its product nor its bias by a number."""
    return all(gemm.attribute(name, 1.0) == 1 for name in ("alpha", "beta"))


def _quantize_embedding(
    graph: EditableGraph, weight_format: WeightFormat, head: Matrix | None
) -> tuple[Tensor, Tensor] | None:
    """Quantize the embedding; returns its codes and scales if the LM head is the same matrix."""
    node = embedding_lookup(graph, TOKENS)
    table = None if node is None else table_of(graph, node)
    if node is None or table is None:
        return None
    codes, scales = rounded(table, weight_format)
    columns = table.shape[1]
    inputs: list[Operand] = [codes, node.input(1), scales.reshaped(*scales.shape, 1)]
    settings = gather_settings(weight_format)
    gathered = graph.value("GatherBlockQuantized", inputs, name="embedding.blocks", **settings)
    value = graph.value("Reshape", [gathered, [0, 0, -1]], name="embedding")
    if columns % weight_format.block:
        value = graph.value("Slice", [value, [0], [columns], [2]], name="embedding.cut")
    graph.replace_value(node.output(0), value)
    return (codes, scales) if head is not None and table.equals(head) else None


def widen(graph: EditableGraph) -> bool:
    """Convert every half-precision value of the graph to float32, inputs and outputs included.

    Returns:
        Whether the caches or weights were in half precision.

    Raises:
        BundleError: a branch of the graph may compute in half precision.
    """
    if not any(graph.element_type(name) in _HALVES for name in (*graph.tensors, *graph.inputs)):
        return False
    for node in graph.nodes:  # types in attributes
        if any(name in node.attributes for name in ("then_branch", "body")):
            raise unsupported("the model has half precision and branches")
        if node.op == "Cast" and node.attribute("to") in _HALVES:
            graph.set_attribute(node, "to", TensorProto.FLOAT)
        filling = node.attribute("value") if node.op == "ConstantOfShape" else None
        if filling is not None and filling.data_type in _HALVES:
            wide_filling = numpy_helper.to_array(filling).astype(np.float32)
            graph.set_attribute(node, "value", numpy_helper.from_array(wide_filling))
    converted: dict[Source, Source] = {}  # a tied matrix remains one matrix
    for name, tensor in list(graph.tensors.items()):
        if tensor.element_type not in _HALVES:
            continue
        if tensor.size >= _LARGE_TABLE and all(node.op == "Gather" for node in graph.consumers(name)):
            for node in graph.consumers(name):  # the gathered rows are converted instead of the table
                rows, readers = node.output(0), graph.consumers(node.output(0))
                wide_rows = graph.value("Cast", [rows], name=f"{rows}.float", to=TensorProto.FLOAT)
                graph.replace_uses(rows, wide_rows, readers)
        else:
            wide = _widened(tensor)
            graph.tensors[name] = replace(wide, source=converted.setdefault(tensor.source, wide.source))
    for info in (*graph.inputs.values(), *graph.outputs.values()):
        if info.type.tensor_type.elem_type in _HALVES:
            info.type.tensor_type.elem_type = TensorProto.FLOAT
    return True


def _widened(tensor: Tensor) -> Tensor:
    """Declare the tensor in float32; it is converted when it is written."""

    def pieces() -> Iterator[Array]:
        flat = tensor.array().reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            yield flat[start : start + _CHUNK].astype(np.float32)

    return Tensor(TensorProto.FLOAT, tensor.shape, Computed(4 * tensor.size, pieces, widens=tensor))
