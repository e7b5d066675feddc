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
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Final

import numpy as np
from onnx import TensorProto

from ..graph.nodes import INT8_ACTIVATIONS, matmul_nbits_settings
from .editable import MICROSOFT, EditableGraph, Node, Operand
from .graph_parts import FLOATS, Array, Computed, Tensor

CODES, SCALES, ZERO_POINTS, GROUPS, BIAS = 1, 2, 3, 4, 5
"""Indices of the inputs of MatMulNBits."""
_SETTINGS: Final = ("K", "bits", "block_size", "accuracy_level")
_SIGN_SHIFT: Final = 128
"""Added to signed codes to make them unsigned; also the default zero point of MatMulNBits."""
_BLOCK_SIZES: Final = (128, 32)
_CHUNK: Final = 1 << 24
"""Number of codes that are transposed at once."""


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
        and not (node.input(ZERO_POINTS) and graph.element_type(node.input(ZERO_POINTS)) in FLOATS)
    ]
    for node in changed:
        graph.set_attribute(node, "accuracy_level", INT8_ACTIVATIONS)
    return len(changed)


def absorb_biases(graph: EditableGraph) -> None:
    """Replace the Add of a constant vector after a quantized linear by a bias of the linear."""
    for node in graph.nodes_of("MatMulNBits"):
        add = graph.sole_reader(node.output(0), "Add")
        if node.input(BIAS) or add is None or node.output(0) in graph.outputs:
            continue
        bias = next((name for name in add.inputs if name in graph.tensors), "")
        if bias and graph.tensors[bias].shape == (node.attribute("N"),):
            graph.set_input(node, BIAS, bias)
            graph.replace_value(add.output(0), node.output(0))
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
    computed = any(name and name not in graph.tensors for name in node.inputs[1:])
    if computed or node.input(GROUPS) or node.output(0) in graph.outputs:
        return None
    # Linears without a bias get zeros; zero points change the arithmetic, so all or none must have them.
    types = (graph.element_type(node.input(index)) for index in (CODES, SCALES, ZERO_POINTS))
    return (node.input(0), *(node.attribute(name, 0) for name in _SETTINGS), *types)


def _join(graph: EditableGraph, nodes: Sequence[Node]) -> None:
    first = nodes[0]
    widths = [int(node.attribute("N")) for node in nodes]
    stem = f"{first.name or first.output(0)}.joined"
    inputs: list[Operand] = [first.input(0)]
    for index in (CODES, SCALES, ZERO_POINTS):
        tensors = [graph.tensors[node.input(index)] for node in nodes if node.input(index)]
        inputs.append(_concatenated(tensors, sum(widths)) if tensors else "")
    if any(node.input(BIAS) for node in nodes):
        dtype = graph.tensors[first.input(SCALES)].array().dtype
        found = [graph.array(node.input(BIAS)) for node in nodes]
        biases = [
            np.zeros(width, dtype) if bias is None else bias.reshape(-1)
            for bias, width in zip(found, widths, strict=True)
        ]
        inputs += ["", np.concatenate(biases)]
    while isinstance(inputs[-1], str):
        inputs.pop()
    attributes = {name: first.attribute(name) for name in _SETTINGS}
    joined = graph.add("MatMulNBits", inputs, name=stem, domain=MICROSOFT, N=sum(widths), **attributes)
    split = graph.add("Split", [joined.output(0), widths], [f"{stem}.{index}" for index in range(len(nodes))], axis=-1)
    for node, part in zip(nodes, split.outputs, strict=True):
        graph.replace_uses(node.output(0), part)


def _concatenated(tensors: Sequence[Tensor], rows: int) -> Tensor:
    """Concatenate tensors [N, ...]; flat ones become [N, columns], as the operator documents them."""
    width = sum(tensor.size for tensor in tensors) // rows
    shape = (rows, *tensors[0].shape[1:]) if len(tensors[0].shape) == 3 else (rows, width)
    length = sum(tensor.nbytes for tensor in tensors)
    source = Computed(length, lambda: chain.from_iterable(tensor.source.pieces() for tensor in tensors))
    return replace(tensors[0], shape=shape, source=source)


def convert_integer_linears(graph: EditableGraph) -> None:
    """Replace every dynamically quantized linear that is recognized."""
    for node in graph.nodes_of("MatMulInteger"):
        quantize = graph.producer_of(node.input(0), "DynamicQuantizeLinear")
        codes = graph.tensors.get(node.input(1))
        cast = graph.sole_reader(node.output(0), "Cast")
        product = None if cast is None else graph.sole_reader(cast.output(0), "Mul")
        if quantize is None or codes is None or len(codes.shape) != 2 or cast is None or product is None:
            continue
        if codes.element_type not in (TensorProto.INT8, TensorProto.UINT8) or node.input(2) != quantize.output(2):
            continue
        others = [name for name in product.inputs if name != cast.output(0)]
        combined = graph.producer_of(others[0], "Mul") if len(others) == 1 else None
        if combined is None or quantize.output(1) not in combined.inputs:
            continue
        stored = [graph.array(name) for name in combined.inputs if name != quantize.output(1)]
        columns, rows = codes.shape
        scales = _by_column(stored[0] if len(stored) == 1 else None, rows)
        zeros = _by_column(graph.array(node.input(3)) if node.input(3) else np.zeros(1), rows)
        if scales is None or zeros is None:
            continue
        shift = _SIGN_SHIFT if codes.element_type == TensorProto.INT8 else 0
        zeros = (zeros.astype(np.int64) + shift).astype(np.uint8)
        block = next((each for each in _BLOCK_SIZES if columns % each == 0), _BLOCK_SIZES[-1])
        blocks = -(-columns // block)
        make = partial(_packed, codes, np.uint8(shift), zeros, blocks * block)
        inputs: list[Operand] = [
            quantize.input(0),
            Tensor.computed(np.uint8, (rows, blocks, block), make),
            np.repeat(scales.astype(np.float32)[:, None], blocks, axis=1),
        ]
        if (zeros != _SIGN_SHIFT).any():
            inputs.append(np.repeat(zeros[:, None], blocks, axis=1))
        settings = matmul_nbits_settings((rows, columns), 8, block)
        linear = graph.value("MatMulNBits", inputs, name=node.name or node.output(0), **settings)
        graph.replace_value(product.output(0), linear)
    graph.sweep()


def _by_column(value: Array | None, columns: int) -> Array | None:
    """Broadcast one number, or one per column, to [columns]; None if the value is neither."""
    if value is None or value.size not in (1, columns):
        return None
    return np.broadcast_to(value.reshape(-1), columns)


def _packed(codes: Tensor, shift: np.uint8, zeros: Array, width: int) -> Iterator[Array]:
    """Yield the unsigned codes of a matrix [K, N], uint8 [N, width]; the rest of a row has its zero point."""
    columns, rows = codes.shape
    stored = codes.array()
    step = max(1, _CHUNK // width)
    for start in range(0, rows, step):
        part = np.ascontiguousarray(stored[:, start : start + step].T).view(np.uint8)
        padding = np.repeat(zeros[start : start + step, None], width - columns, axis=1)
        yield np.concatenate([part + shift, padding], axis=1)  # modulo 256: -128 becomes 0
