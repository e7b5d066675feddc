"""Splits stacked or transposed caches into key and value tensors [1, heads, slots, channels].

Old exports of GPT-2 stack keys and values in [2, batch, heads, past, channels], StarCoder's concatenate them in
[batch, past, 2 * channels], and BLOOM's transpose the keys. The nodes between a cache input and the Concat that appends
new slots are run once to learn the shape of the part: that value becomes the new graph input, and the result of the
Concat becomes the new output.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from onnx import helper

from ...errors import BundleError, ExportError
from .editable import EditableGraph, Node
from .graph_parts import FLOATS, unsupported
from .subgraph_runner import run_part

_PAST: Final = 5
"""Cached slots of the trial run; other dimensions of a cache are unlikely to have this size."""
_SPLITTING: Final = frozenset({"Cast", "Gather", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"})
_JOINING: Final = frozenset({"Cast", "Concat", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})

_Part = tuple[str, str, Node]
"""Keys or values within a cache tensor: the graph input, the past slots that are computed from it, and the Concat that
appends the new slots."""


def split_caches(graph: EditableGraph) -> None:
    """Give each part of a cache a graph input and output of its own; caches of one part do not change.

    Raises:
        BundleError: the structure of a cache is unknown.
    """
    parts = [part for name in list(graph.inputs) for part in _parts(graph, name)]
    for index, part in enumerate(parts):
        _replace_shapes(graph, part, index)
        _replace_cache(graph, part, index)
    graph.sweep()
    for name in {cache for cache, _, _ in parts}:
        if graph.consumers(name):
            raise _unknown_structure(name)
        del graph.inputs[name]


def _parts(graph: EditableGraph, cache: str) -> Iterator[_Part]:
    """Find the Concat nodes that are reached from an input, if it may be a cache, through operators that split it."""
    if graph.element_type(cache) not in FLOATS or len(graph.shape(cache) or ()) not in (3, 4, 5) or "mask" in cache:
        return
    for value, node in graph.readers(cache, lambda value, node: node.op in _SPLITTING and node.input(0) == value):
        appends = node.op == "Concat" and len(node.inputs) == 2 and node.input(0) == value
        if appends and (value != cache or node.output(0) not in graph.outputs):
            yield cache, value, node


def _replace_shapes(graph: EditableGraph, part: _Part, index: int) -> None:
    """Compute shapes of the old cache from the shape of the part."""
    cache, value, _ = part
    shape = graph.shape(cache) or ()
    symbolic = _symbolic_axes(shape)
    for node in graph.consumers(cache):
        if node.op != "Shape":
            continue
        if node.attribute("start", 0) or node.attribute("end") is not None or not symbolic:
            raise _unknown_structure(cache)
        whole = graph.value("Shape", [value], name=f"parted.{index}.shape")
        past = graph.value("Gather", [whole, [2]], name=f"parted.{index}.past", axis=0)
        sizes: list[str | list[int]] = [[size if isinstance(size, int) else 1] for size in shape]
        sizes[symbolic[-1]] = past
        graph.replace_uses(node.output(0), graph.value("Concat", sizes, name=f"parted.{index}.extents", axis=0))


def _symbolic_axes(shape: tuple[int | str, ...]) -> list[int]:
    """Axes without a number. The last of them is the number of slots, any other one the batch."""
    return [axis for axis, size in enumerate(shape) if not isinstance(size, int)]


def _replace_cache(graph: EditableGraph, part: _Part, index: int) -> None:
    cache, value, concat = part
    _, heads, _, channels = _part_shape(graph, cache, value)
    element_type = graph.element_type(cache)
    joined = concat.output(0)
    joining = [node for _, node in graph.readers(joined, lambda _, node: node.op in _JOINING) if node.op in _JOINING]
    for output in {joined, *(name for node in joining for name in node.outputs)}:  # they contain the part's slots
        graph.outputs.pop(output, None)
    past, present = (f"{cache}.{side}.{index}" for side in ("past", "present"))
    graph.set_aside(past)
    graph.inputs[past] = helper.make_tensor_value_info(past, element_type, [1, heads, "past", channels])
    graph.replace_uses(value, past)
    graph.set_output(helper.make_tensor_value_info(present, element_type, [1, heads, "total", channels]), joined)


def _part_shape(graph: EditableGraph, name: str, value: str) -> tuple[int, ...]:
    """Shape of `value`, the past slots of a part, for a cache `name` of `_PAST` slots."""
    declared = graph.shape(name) or ()
    fed = [size if isinstance(size, int) else 1 for size in declared]
    for axis in _symbolic_axes(declared)[-1:]:
        fed[axis] = _PAST
    cache = np.zeros(fed, helper.tensor_dtype_to_np_dtype(graph.element_type(name)))
    try:
        order = {node: index for index, node in enumerate(graph.in_order())}
        found = run_part(graph, order, "Shape", [value], {name: cache}.get)[0][value]
    except ExportError as error:
        raise _unknown_structure(name) from error
    if len(found) != 4 or found[0] != 1 or found[2] != _PAST:
        raise _unknown_structure(name)
    return tuple(found.tolist())


def _unknown_structure(cache: str) -> BundleError:
    return unsupported(f"the structure of the model's cache {cache} is unknown")
