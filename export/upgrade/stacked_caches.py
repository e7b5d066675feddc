"""Caches that keep keys and values in one tensor, or turned, become inputs and outputs of [1, heads, rows, channels].

Old exports of GPT-2 stack both in [2, batch, heads, past, channels], StarCoder's join them in [batch, past,
2 * channels], BLOOM's turn the keys. Whatever a graph does to a cache before it joins the new rows to it is run once to
see what comes out: that value becomes the new input, and what the rows are joined to becomes the new output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from onnx import GraphProto, TensorProto, ValueInfoProto, helper, numpy_helper

from ...errors import BundleError, ExportError
from ..check.contract_session import evaluate
from .edit.editable import EditableGraph, Node

_PAST: Final = 5
"""Rows of the experiment; no other extent of a cache is likely to be as small and odd."""
_TAKING_APART: Final = frozenset({"Cast", "Gather", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"})
_PUTTING_TOGETHER: Final = frozenset({"Cast", "Concat", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_FLOATS: Final = (TensorProto.FLOAT, TensorProto.FLOAT16)


@dataclass(frozen=True)
class _Part:
    """Keys or values within a cache."""

    cache: str
    value: str
    """The rows so far, taken out of the cache."""
    joined: Node
    """The Concat that puts the new rows behind."""


def part_caches(graph: EditableGraph) -> None:
    """Give the graph a cache input and output of its own for each part of a cache; usual caches stay as they are.

    Raises:
        BundleError: a cache is put together in a way that is not known.
    """
    parts = [part for name in list(graph.inputs) if _may_be_cache(graph, name) for part in _parts(graph, name)]
    for index, part in enumerate(parts):
        _settle_extents(graph, part, index)
        _replace(graph, part, index)
    graph.sweep()
    for name in {part.cache for part in parts}:
        if graph.consumers(name):
            raise _unknown(name)
        del graph.inputs[name]


def _may_be_cache(graph: EditableGraph, name: str) -> bool:
    shape = graph.shape(name)
    return graph.element_type(name) in _FLOATS and shape is not None and len(shape) in (3, 4, 5) and "mask" not in name


def _parts(graph: EditableGraph, cache: str) -> Iterator[_Part]:
    """The Concat nodes that are reached from a cache through what takes it apart."""
    waiting = [cache]
    while waiting:
        value = waiting.pop(0)
        for node in graph.consumers(value):
            if node.op == "Concat" and len(node.inputs) == 2 and node.input(0) == value:
                if value != cache or node.output(0) not in graph.outputs:
                    yield _Part(cache, value, node)
            elif node.op in _TAKING_APART and node.input(0) == value:
                waiting += [name for name in node.outputs if name]


def _settle_extents(graph: EditableGraph, part: _Part, index: int) -> None:
    """Let what asks the old cache for its extents ask the new one."""
    shape = graph.shape(part.cache) or ()
    opened = [axis for axis, extent in enumerate(shape) if not isinstance(extent, int)]
    for node in graph.consumers(part.cache):
        if node.op != "Shape":
            continue
        if node.attribute("start", 0) or node.attribute("end") is not None or not opened:
            raise _unknown(part.cache)
        whole = graph.add("Shape", [part.value], name=f"parted.{index}.shape").output(0)
        rows = graph.add_tensor("parted.rows", np.array([2], np.int64))
        past = graph.add("Gather", [whole, rows], name=f"parted.{index}.past", axis=0).output(0)
        extents = [
            past
            if axis == opened[-1]
            else graph.add_tensor("parted.extent", np.array([extent if isinstance(extent, int) else 1], np.int64))
            for axis, extent in enumerate(shape)
        ]
        graph.replace_uses(
            node.output(0), graph.add("Concat", extents, name=f"parted.{index}.extents", axis=0).output(0)
        )


def _replace(graph: EditableGraph, part: _Part, index: int) -> None:
    extents = _extents(graph, part)
    kind = graph.element_type(part.cache)
    for output in _outputs(graph, part.joined.output(0)):
        del graph.outputs[output]
    past, present = (f"{part.cache}.{side}.{index}" for side in ("past", "present"))
    graph.add_input(helper.make_tensor_value_info(past, kind, [extents[0], extents[1], "past", extents[3]]))
    graph.replace_uses(part.value, past)
    info = helper.make_tensor_value_info(present, kind, [extents[0], extents[1], "total", extents[3]])
    graph.set_output(info, part.joined.output(0))


def _extents(graph: EditableGraph, part: _Part) -> tuple[int, ...]:
    """Extents of the rows so far for a cache of `_PAST` rows."""
    nodes: dict[Node, None] = {}
    waiting = [part.value]
    while waiting:
        name = waiting.pop()
        node = graph.producer(name)
        if node is not None and name != part.cache:
            nodes[node] = None
            waiting += [each for each in node.inputs if each]
    shape = graph.shape(part.cache) or ()
    opened = [axis for axis, extent in enumerate(shape) if not isinstance(extent, int)]
    fed = [extent if isinstance(extent, int) else 1 for extent in shape]
    if opened:
        fed[opened[-1]] = _PAST
    constants = {name for node in nodes for name in node.inputs if name in graph.tensors}
    order = [node for node in graph.in_order() if node in nodes]
    piece = GraphProto(
        name="cache",
        node=[*(node.proto() for node in order), helper.make_node("Identity", [part.value], ["part"])],
        initializer=[numpy_helper.from_array(np.asarray(graph.array(name)), name) for name in constants],
        input=[helper.make_tensor_value_info(part.cache, graph.element_type(part.cache), fed)],
        output=[ValueInfoProto(name="part")],
    )
    opsets = [helper.make_opsetid(domain, version) for domain, version in graph.opsets.items()]
    feeds = {part.cache: np.zeros(fed, helper.tensor_dtype_to_np_dtype(graph.element_type(part.cache)))}
    try:
        extents = evaluate(helper.make_model(piece, opset_imports=opsets, ir_version=10), feeds)[0].shape
    except ExportError as error:
        raise _unknown(part.cache) from error
    if len(extents) != 4 or extents[0] != 1 or extents[2] != _PAST:
        raise _unknown(part.cache)
    return extents


def _outputs(graph: EditableGraph, joined: str) -> list[str]:
    """The graph outputs into which joined rows are put."""
    found, waiting, seen = [], [joined], {joined}
    while waiting:
        value = waiting.pop()
        if value in graph.outputs:
            found.append(value)
        for node in graph.consumers(value):
            fresh = [name for name in node.outputs if name and name not in seen]
            if node.op in _PUTTING_TOGETHER and value in node.inputs:
                seen.update(fresh)
                waiting += fresh
    return found


def _unknown(cache: str) -> BundleError:
    return BundleError(f"the model's cache {cache} is put together in a way that is not known", "run it as it is")
