"""Rewrites quantized linears for the CPU: joined, with biases inside and 8-bit activations.

Rows of a MatMulNBits are independent of each other, and its codes, scales and zero points are stored row by row. So two
linears that share an input are joined by writing the bytes of the second after those of the first, and every output
stays the same. One call instead of two or three saves rounding the input to 8 bits again and waking threads.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from onnx import TensorProto

from ...graph.nodes import INT8_ACTIVATIONS
from ..edit.editable import MICROSOFT, EditableGraph, Node
from ..edit.tensors import Array, Computed, Tensor

_CODES, _SCALES, _ZERO_POINTS, _GROUPS, _BIAS = 1, 2, 3, 4, 5
"""Indices of the inputs of MatMulNBits."""
_FLOATS: Final = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


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
    inputs = [first.input(0)]
    for index, role in ((_CODES, "codes"), (_SCALES, "scales"), (_ZERO_POINTS, "zero_points")):
        tensors = [graph.tensors[node.input(index)] for node in nodes if node.input(index)]
        inputs.append(graph.add_tensor(f"{stem}.{role}", _concatenated(tensors, sum(widths))) if tensors else "")
    if any(node.input(_BIAS) for node in nodes):
        biases = [_bias(graph, node, width) for node, width in zip(nodes, widths, strict=True)]
        inputs += ["", graph.add_tensor(f"{stem}.bias", np.concatenate(biases))]
    while not inputs[-1]:
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
