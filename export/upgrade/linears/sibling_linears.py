"""Quantized linears as the CPU likes them: joined where they read the same value, biases inside, 8-bit activations.

Rows of a MatMulNBits are independent of each other, and its codes, scales and zero points are stored row after row. So
two that read the same value become one by writing the bytes of the second behind those of the first; every output stays
what it was. One call instead of two or three saves rounding the value to 8 bits again, and the threads' waking up.
"""

from __future__ import annotations

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
_WIDE: Final = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def round_activations(graph: EditableGraph) -> int:
    """Ask for 8-bit activations where a linear leaves them open, the level with a fast kernel at every width; returns
    how many linears that were. Those with zero points in floating point have no such kernel."""
    opened = [
        node
        for node in graph.nodes_of("MatMulNBits")
        if not node.attribute("accuracy_level", 0)
        and node.attribute("bits", 4) in (4, 8)
        and not (node.input(_ZERO_POINTS) and graph.element_type(node.input(_ZERO_POINTS)) in _WIDE)
    ]
    for node in opened:
        graph.set_attribute(node, "accuracy_level", INT8_ACTIVATIONS)
    return len(opened)


def take_in_biases(graph: EditableGraph) -> None:
    """Make an Add of a constant vector behind a quantized linear the linear's own bias."""
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


def join_siblings(graph: EditableGraph) -> int:
    """Join quantized linears that read the same value; returns how many calls that saves."""
    families: defaultdict[tuple[object, ...], list[Node]] = defaultdict(list)
    for node in graph.in_order():
        if node.op == "MatMulNBits" and (likeness := _likeness(graph, node)) is not None:
            families[likeness].append(node)
    saved = 0
    for nodes in families.values():
        if len(nodes) > 1:
            _join(graph, _in_heads_order(graph, nodes))
            saved += len(nodes) - 1
    graph.sweep()
    return saved


def _likeness(graph: EditableGraph, node: Node) -> tuple[object, ...] | None:
    """What linears must have in common to be one; None for one that stays by itself."""
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
    # A bias that only some have is zeros for the rest; zero points change the arithmetic and must be common.
    return (node.input(0), *settings, *(each.element_type for each in stored if each), optional[0])


def _in_heads_order(graph: EditableGraph, nodes: Sequence[Node]) -> list[Node]:
    """Query, key and value of one attention in that order, as its packed input wants them; others as they stand."""
    attention = _attention_of(graph, nodes)
    return list(nodes) if attention is None else sorted(nodes, key=lambda node: attention.inputs.index(node.output(0)))


def _attention_of(graph: EditableGraph, nodes: Sequence[Node]) -> Node | None:
    """The attention whose query, key and value the nodes are, and nothing else's."""
    readers = {reader for node in nodes for reader in graph.consumers(node.output(0))}
    if len(nodes) != 3 or len(readers) != 1:
        return None
    (reader,) = readers
    fed = reader.op == "GroupQueryAttention" and set(reader.inputs[:3]) == {node.output(0) for node in nodes}
    return reader if fed else None


def _join(graph: EditableGraph, nodes: Sequence[Node]) -> None:
    attention = _attention_of(graph, nodes)
    first = nodes[0]
    widths = [int(node.attribute("N")) for node in nodes]
    stem = f"{first.name or first.output(0)}.joined"
    inputs = [first.input(0)]
    for index, role in ((_CODES, "codes"), (_SCALES, "scales"), (_ZERO_POINTS, "zero_points")):
        tensors = [graph.tensors[node.input(index)] for node in nodes if node.input(index)]
        inputs.append(graph.add_tensor(f"{stem}.{role}", _stacked(tensors, sum(widths))) if tensors else "")
    if any(node.input(_BIAS) for node in nodes):
        biases = [_bias(graph, node, width) for node, width in zip(nodes, widths, strict=True)]
        inputs += ["", graph.add_tensor(f"{stem}.bias", np.concatenate(biases))]
    while not inputs[-1]:
        inputs.pop()
    attributes = {name: first.attribute(name) for name in ("K", "bits", "block_size", "accuracy_level")}
    joined = graph.add("MatMulNBits", inputs, name=stem, domain=MICROSOFT, N=sum(widths), **attributes)
    if attention is not None:
        graph.set_inputs(attention, [joined.output(0), "", "", *attention.inputs[3:]])
        return
    parts = graph.add_tensor(f"{stem}.widths", np.array(widths, np.int64))
    split = graph.add("Split", [joined.output(0), parts], [f"{stem}.{index}" for index in range(len(nodes))], axis=-1)
    for node, part in zip(nodes, split.outputs, strict=True):
        graph.replace_uses(node.output(0), part)


def _stacked(tensors: Sequence[Tensor], rows: int) -> Tensor:
    """Tensors [N, ...] one after the other; those stored flat come out with rows, as the operator documents them."""
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
