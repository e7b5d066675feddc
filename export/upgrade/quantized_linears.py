"""Rewrites quantized linears for the CPU: joined, with biases inside and 8-bit activations.

Those of ONNX Runtime's dynamic quantization become MatMulNBits without being rounded again. `quantize_dynamic` (and so
Optimum's and transformers.js's int8 files) writes a linear as

    DynamicQuantizeLinear(x) -> codes, scale, zero point;  MatMulInteger(codes, W);  Cast;  Mul(scale * W's scale)

with one scale, and possibly one zero point, for W or for each of its columns. MatMulNBits holds the same weights with
the scale repeated for every block. It rounds activations block by block and not over all tokens together, so that the
logits of a token do not depend on the other tokens of the pass.

Rows of a MatMulNBits are independent of each other, and its codes, scales and zero points are stored row by row. So two
linears that share an input are joined by writing the bytes of the second after those of the first, and every output
stays the same. One call instead of two or three saves rounding the input to 8 bits again and waking threads.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from onnx import TensorProto

from ..graph.nodes import INT8_ACTIVATIONS
from .editable import MICROSOFT, EditableGraph, Node, Operand
from .graph_parts import Array, Computed, Tensor

_CODES, _SCALES, _ZERO_POINTS, _GROUPS, _BIAS = 1, 2, 3, 4, 5
"""Indices of the inputs of MatMulNBits."""
_SIGN_SHIFT: Final = 128
"""Added to signed codes to make them unsigned; also the default zero point of MatMulNBits."""
_BLOCK_SIZES: Final = (128, 32)
_CHUNK: Final = 1 << 24
"""Number of codes that are transposed at once."""
_FLOATS: Final = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass(frozen=True)
class _Linear:
    """A dynamically quantized linear."""

    value: str
    """The input."""
    result: str
    """The output."""
    codes: Tensor
    """int8 or uint8 [K, N]"""
    scales: Array
    """float32 [N]"""
    zeros: Array
    """Zero points of the unsigned codes, uint8 [N]"""

    @property
    def shift(self) -> int:
        """Number that is added to the codes to make them unsigned."""
        return _SIGN_SHIFT if self.codes.element_type == TensorProto.INT8 else 0


def quantized_linear(
    graph: EditableGraph, name: str, inputs: Sequence[Operand], shape: tuple[int, int], bits: int, block: int
) -> str:
    """Add a linear [N, K] of few bits that rounds activations to 8 bits; returns its result."""
    return graph.value(
        "MatMulNBits",
        inputs,
        name=name,
        domain=MICROSOFT,
        N=shape[0],
        K=shape[1],
        bits=bits,
        block_size=block,
        accuracy_level=INT8_ACTIVATIONS,
    )


def round_activations(graph: EditableGraph) -> int:
    """Set 8-bit activations for linears without an accuracy level; that level has fast kernels at every pass width.

    Linears with floating-point zero points have no such kernel and do not change.

    Returns:
        Number of linears that changed.
    """
    changed = [
        node
        for node in graph.nodes_of("MatMulNBits")
        if not node.attribute("accuracy_level", 0)
        and node.attribute("bits", 4) in (4, 8)
        and not (node.input(_ZERO_POINTS) and graph.element_type(node.input(_ZERO_POINTS)) in _FLOATS)
    ]
    for node in changed:
        graph.set_attribute(node, "accuracy_level", INT8_ACTIVATIONS)
    return len(changed)


def absorb_biases(graph: EditableGraph) -> None:
    """Replace the Add of a constant vector after a quantized linear by a bias of the linear."""
    for node in graph.nodes_of("MatMulNBits"):
        readers = graph.consumers(node.output(0))
        if node.input(_BIAS) or len(readers) != 1 or readers[0].op != "Add" or node.output(0) in graph.outputs:
            continue
        add = readers[0]
        bias = next((name for name in add.inputs if name in graph.tensors), "")
        if bias and graph.tensors[bias].shape == (node.attribute("N"),):
            graph.set_input(node, _BIAS, bias)
            graph.replace_uses(add.output(0), node.output(0))
            if add.output(0) in graph.outputs:
                graph.set_output(graph.outputs[add.output(0)], node.output(0))
            graph.remove(add)


def join_linears(graph: EditableGraph) -> None:
    """Join quantized linears that share an input."""
    groups: defaultdict[tuple[object, ...], list[Node]] = defaultdict(list)
    for node in graph.in_order():
        if node.op == "MatMulNBits" and (key := _group_key(graph, node)) is not None:
            groups[key].append(node)
    for nodes in groups.values():
        if len(nodes) > 1:
            _join(graph, nodes)
    graph.sweep()


def share_reshaped_constants(graph: EditableGraph) -> None:
    """Replace reshaped constants by constants of another shape with the same bytes.

    ONNX Runtime GenAI ties an embedding to the LM head by reshaping the head's codes when the model is loaded, which
    copies the whole matrix in memory. With the same bytes under two names, both are mapped from one place in the file.
    """
    for node in graph.nodes_of("Reshape"):
        tensor, wanted = graph.tensors.get(node.input(0)), graph.integers(node.input(1))
        if tensor is None or wanted is None or node.output(0) in graph.outputs:
            continue
        shape = [tensor.shape[axis] if size == 0 else size for axis, size in enumerate(wanted)]
        if -1 in shape:
            shape[shape.index(-1)] = tensor.size // -math.prod(shape)
        alias = graph.add_tensor(f"{node.input(0)}.{'x'.join(map(str, shape))}", tensor.reshaped(*shape))
        graph.replace_uses(node.output(0), alias)
    graph.sweep()


def _group_key(graph: EditableGraph, node: Node) -> tuple[object, ...] | None:
    """What linears must have in common to be joined; None for one that cannot be joined."""
    stored = [graph.tensors.get(node.input(index)) for index in (_CODES, _SCALES)]
    if None in stored or node.input(_GROUPS) or node.output(0) in graph.outputs:
        return None
    optional = []
    for index in (_ZERO_POINTS, _BIAS):
        tensor = graph.tensors.get(node.input(index))
        if node.input(index) and tensor is None:
            return None
        optional.append(None if tensor is None else tensor.element_type)
    settings = tuple(node.attribute(name, 0) for name in ("K", "bits", "block_size", "accuracy_level"))
    # Linears without a bias get zeros; zero points change the arithmetic, so all or none must have them.
    return (node.input(0), *settings, *(each.element_type for each in stored if each), optional[0])


def _join(graph: EditableGraph, nodes: Sequence[Node]) -> None:
    first = nodes[0]
    widths = [int(node.attribute("N")) for node in nodes]
    stem = f"{first.name or first.output(0)}.joined"
    inputs: list[Operand] = [first.input(0)]
    for index in (_CODES, _SCALES, _ZERO_POINTS):
        tensors = [graph.tensors[node.input(index)] for node in nodes if node.input(index)]
        inputs.append(_concatenated(tensors, sum(widths)) if tensors else "")
    if any(node.input(_BIAS) for node in nodes):
        biases = [_bias(graph, node, width) for node, width in zip(nodes, widths, strict=True)]
        inputs += ["", np.concatenate(biases)]
    while isinstance(inputs[-1], str):
        inputs.pop()
    attributes = {name: first.attribute(name) for name in ("K", "bits", "block_size", "accuracy_level")}
    joined = graph.add("MatMulNBits", inputs, name=stem, domain=MICROSOFT, N=sum(widths), **attributes)
    split = graph.add("Split", [joined.output(0), widths], [f"{stem}.{index}" for index in range(len(nodes))], axis=-1)
    for node, part in zip(nodes, split.outputs, strict=True):
        graph.replace_uses(node.output(0), part)


def _concatenated(tensors: Sequence[Tensor], rows: int) -> Tensor:
    """Concatenate tensors [N, ...]; flat ones become [N, columns], as the operator documents them."""
    length = sum(tensor.nbytes for tensor in tensors)

    def pieces() -> Iterator[Array]:
        for tensor in tensors:
            yield from tensor.source.pieces()

    width = sum(tensor.size for tensor in tensors) // rows
    shape = (rows, *tensors[0].shape[1:]) if len(tensors[0].shape) == 3 else (rows, width)
    return replace(tensors[0], shape=shape, source=Computed(length, pieces))


def _bias(graph: EditableGraph, node: Node, width: int) -> Array:
    name = node.input(_BIAS)
    if name:
        return graph.tensors[name].array().reshape(-1)
    return np.zeros(width, graph.tensors[node.input(_SCALES)].array().dtype)


def convert_integer_linears(graph: EditableGraph) -> None:
    """Replace every dynamically quantized linear that is recognized."""
    for node in graph.nodes_of("MatMulInteger"):
        linear = _linear(graph, node)
        if linear is not None:
            _replace(graph, node.name or node.output(0), linear)
    graph.sweep()


def _linear(graph: EditableGraph, node: Node) -> _Linear | None:
    quantize = graph.producer_of(node.input(0), "DynamicQuantizeLinear")
    codes = graph.tensors.get(node.input(1))
    cast = _reader(graph, node.output(0), "Cast")
    product = None if cast is None else _reader(graph, cast.output(0), "Mul")
    if quantize is None or codes is None or len(codes.shape) != 2 or cast is None or product is None:
        return None
    if codes.element_type not in (TensorProto.INT8, TensorProto.UINT8) or node.input(2) != quantize.output(2):
        return None
    others = [name for name in product.inputs if name != cast.output(0)]
    combined = graph.producer_of(others[0], "Mul") if len(others) == 1 else None
    if combined is None or quantize.output(1) not in combined.inputs:
        return None
    stored = [graph.array(name) for name in combined.inputs if name != quantize.output(1)]
    scales = _by_column(stored[0] if len(stored) == 1 else None, codes.shape[1])
    zeros = _by_column(graph.array(node.input(3)) if node.input(3) else np.zeros(1), codes.shape[1])
    if scales is None or zeros is None:
        return None
    shift = _SIGN_SHIFT if codes.element_type == TensorProto.INT8 else 0
    unsigned = (zeros.astype(np.int64) + shift).astype(np.uint8)
    return _Linear(quantize.input(0), product.output(0), codes, scales.astype(np.float32), unsigned)


def _by_column(value: Array | None, columns: int) -> Array | None:
    """Broadcast one number, or one per column, to [columns]; None if the value is neither."""
    if value is None or value.size not in (1, columns):
        return None
    return np.broadcast_to(value.reshape(-1), columns)


def _replace(graph: EditableGraph, stem: str, linear: _Linear) -> None:
    columns, rows = linear.codes.shape
    block = next((each for each in _BLOCK_SIZES if columns % each == 0), _BLOCK_SIZES[-1])
    blocks = -(-columns // block)
    packed = Tensor.computed(np.uint8, (rows, blocks, block), lambda: _packed(linear, blocks * block))
    inputs: list[Operand] = [linear.value, packed, np.repeat(linear.scales[:, None], blocks, axis=1)]
    if (linear.zeros != _SIGN_SHIFT).any():
        inputs.append(np.repeat(linear.zeros[:, None], blocks, axis=1))
    graph.replace_value(linear.result, quantized_linear(graph, stem, inputs, (rows, columns), 8, block))


def _packed(linear: _Linear, width: int) -> Iterator[Array]:
    """Yield unsigned codes, uint8 [rows, width]; an incomplete last block is padded with the zero point."""
    columns, rows = linear.codes.shape
    stored = linear.codes.array()
    step = max(1, _CHUNK // width)
    for start in range(0, rows, step):
        part = np.ascontiguousarray(stored[:, start : start + step].T).view(np.uint8)
        unsigned = part + np.uint8(linear.shift)  # modulo 256: -128 becomes 0
        padding = np.repeat(linear.zeros[start : start + step, None], width - columns, axis=1)
        yield np.concatenate([unsigned, padding], axis=1)


def _reader(graph: EditableGraph, name: str, op: str) -> Node | None:
    """The only reader of a value, if it is that operator."""
    readers = graph.consumers(name)
    return readers[0] if len(readers) == 1 and readers[0].op == op else None
