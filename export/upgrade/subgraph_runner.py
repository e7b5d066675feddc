"""Runs parts of a graph on made-up values to find out what they compute.

An exporter may write the same thing (a causal mask, a rotary embedding) in many ways, so graph passes do not compare
nodes with templates. They cut a subgraph out of the graph, feed it values of their own and look at the results.

Shapes of values are learned once, from two runs of the whole graph. A `Shape` of a value is then a constant, and
everything before it can be left out.

A run reads one sequence: new tokens after a number of cached ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

import numpy as np
from onnx import NodeProto, TensorProto, ValueInfoProto, helper

from ...errors import BundleError, ExportError
from ..check.contract_session import evaluate_passes
from .decoder_io import TOKENS, PassShape, input_value
from .editable import EditableGraph, Node
from .graph_parts import Array, in_place

Dimension = int | Literal["new", "past", "total"]
"""A dimension of a value: a number, or the field of `PassShape` that it equals."""

_FIRST: Final = PassShape(7, 13)
_SECOND: Final = PassShape(11, 19)
"""The two passes from which shapes are learned. Their numbers and sums are all different."""
_OF_SHAPES: Final = ("Shape", "Size")
_LENGTHS: Final[Mapping[tuple[int, int], Dimension]] = {
    (_FIRST.new, _SECOND.new): "new",
    (_FIRST.past, _SECOND.past): "past",
    (_FIRST.total, _SECOND.total): "total",
}
"""What a dimension is that has these sizes in the two passes."""


class SubgraphRunner:
    """Runs subgraphs of a graph, which must not be changed meanwhile."""

    def __init__(self, graph: EditableGraph) -> None:
        """Learn the shapes of the graph's values.

        Raises:
            BundleError: the graph is not a decoder with a cache, or it cannot be run.
        """
        self.graph = graph
        self.order: dict[Node, int] = {node: index for index, node in enumerate(graph.in_order())}
        """Position of each node in topological order."""
        readers = [node for _, node in graph.readers(TOKENS, lambda _, node: node.op not in _OF_SHAPES)]
        self.token_dependent = {
            TOKENS,
            *(name for node in readers if node.op not in _OF_SHAPES for name in node.outputs),
        }
        """Values that depend on the token ids, other than through their shape."""
        self._shapes: dict[str, tuple[Dimension, ...]] = {}
        names = [*graph.inputs, *(name for node in self.order for name in node.outputs if name)]
        fed = (
            {name: input_value(info, lengths) for name, info in graph.inputs.items()}.get
            for lengths in (_FIRST, _SECOND)
        )
        try:
            first, second = run_part(graph, self.order, "Shape", names, *fed)
        except ExportError as error:
            raise BundleError(
                f"the model's graph does not run on one sequence with a cache: {error.what}",
                "such a graph cannot be upgraded",
            ) from error
        for name in names:
            pairs = list(zip(first[name].tolist(), second[name].tolist(), strict=False))
            if len(first[name]) == len(second[name]) and all(a == b or (a, b) in _LENGTHS for a, b in pairs):
                self._shapes[name] = tuple(a if a == b else _LENGTHS[a, b] for a, b in pairs)

    def inputs(self, node: Node) -> list[str]:
        """Inputs of a node that depend on the token ids."""
        return [name for name in node.inputs if name in self.token_dependent]

    def shape(self, name: str) -> tuple[Dimension, ...] | None:
        """Shape of a value; None if it is unknown or depends on anything but the lengths of the pass."""
        tensor = self.graph.tensors.get(name)
        return self._shapes.get(name) if tensor is None else tensor.shape

    def run(
        self, wanted: Sequence[str], lengths: PassShape, given: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """Compute values of the graph in one run.

        Args:
            wanted: names of the values to compute.
            lengths: number of new and cached tokens.
            given: values that are fed instead of being computed.

        Returns:
            The computed values by name.

        Raises:
            ExportError: the subgraph cannot be run.
        """
        fed = given or {}

        def known(name: str) -> Array | None:
            if name in fed:
                return fed[name]
            if name in self.graph.inputs:
                return input_value(self.graph.inputs[name], lengths)
            node = self.graph.producer_of(name, "Shape")
            dimensions = None if node is None or node.input(0) in fed else self._shapes.get(node.input(0))
            if node is None or dimensions is None:
                return None
            return np.array(sizes(dimensions, lengths)[node.attribute("start", 0) : node.attribute("end")], np.int64)

        return run_part(self.graph, self.order, "Identity", wanted, known)[0]


def sizes(dimensions: Sequence[Dimension], lengths: PassShape) -> list[int]:
    """The numbers that dimensions are in a pass."""
    return [each if isinstance(each, int) else int(getattr(lengths, each)) for each in dimensions]


def channels(dimensions: Sequence[Dimension]) -> int:
    """Product of the dimensions that are numbers: channels of all heads together, or heads."""
    return math.prod(each for each in dimensions if isinstance(each, int))


def run_part(
    graph: EditableGraph,
    order: Mapping[Node, int],
    op: str,
    wanted: Sequence[str],
    *passes: Callable[[str], Array | None],
) -> list[dict[str, Array]]:
    """Run the nodes that some values need.

    Args:
        graph: the graph.
        order: position of each node in topological order.
        op: operator that is applied to each of the values; "Identity" for the values themselves.
        wanted: names of the values.
        passes: gives, for each pass, a value that is fed instead of being computed, by its name.

    Raises:
        ExportError: they cannot be run.
    """
    feeds: list[dict[str, Array]] = [{} for _ in passes]
    needed: dict[Node, None] = {}
    stored: list[tuple[TensorProto, NodeProto | None]] = []
    waiting, seen = list(wanted), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        node = graph.producer(name)
        values = [value for known in passes if (value := known(name)) is not None]
        if values:
            for fed, value in zip(feeds, values, strict=True):
                fed[name] = np.ascontiguousarray(value)
        elif node is not None:
            needed[node] = None
            waiting += node.reads()
        elif name in graph.tensors:
            stored.append(in_place(name, graph.tensors[name]))
        else:
            raise ExportError(f"no node computes the value {name}")
    # A graph output cannot be a graph input or a constant, so each wanted value has a node of its own.
    outputs = [f"wanted.{index}" for index in range(len(wanted))]
    nodes = [
        *(cast for _, cast in stored if cast),
        *(node.proto() for node in sorted(needed, key=order.__getitem__)),
        *(helper.make_node(op, [name], [output]) for name, output in zip(wanted, outputs, strict=True)),
    ]
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), [None] * value.ndim)
        for name, value in feeds[0].items()
    ]
    results = [ValueInfoProto(name=name) for name in outputs]
    part = helper.make_graph(nodes, "part", inputs, results, [tensor for tensor, _ in stored])
    opsets = [helper.make_opsetid(domain, version) for domain, version in graph.opsets.items()]
    model = helper.make_model(part, opset_imports=opsets, ir_version=10)
    return [dict(zip(wanted, found, strict=True)) for found in evaluate_passes(model, feeds, graph.folder)]
