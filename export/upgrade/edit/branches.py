"""Merged decoders: one graph with a branch for an empty cache and one for a filled one.

Optimum before 1.14 wrote them (`decoder_model_merged.onnx`), and transformers.js took them over: an `If` on the input
`use_cache_branch`. The branch that reads a cache also serves one without rows, so it alone is kept.
"""

from __future__ import annotations

from typing import Final

from onnx import GraphProto, TensorProto

from ....errors import BundleError
from .editable import EditableGraph, Node

_CACHED: Final = "then_branch"


def take_cached_branch(graph: EditableGraph) -> None:
    """Put the nodes of the branch that reads the cache in the place of the `If`; other graphs stay as they are.

    Raises:
        BundleError: the branch cannot stand by itself.
    """
    for node in graph.nodes_of("If"):
        switch = _switch(graph, node)
        if switch is not None:
            _take(graph, node)
            graph.inputs.pop(switch)


def _switch(graph: EditableGraph, node: Node) -> str | None:
    """The boolean graph input that an If is decided by."""
    name = node.input(0)
    while (maker := graph.producer_of(name, "Cast", "Squeeze", "Reshape")) is not None:
        name = maker.input(0)
    return name if name in graph.inputs and graph.element_type(name) == TensorProto.BOOL else None


def _take(graph: EditableGraph, node: Node) -> None:
    branch = node.attribute(_CACHED)
    if not isinstance(branch, GraphProto) or branch.sparse_initializer:
        raise BundleError("the model's branch for a filled cache cannot be read", "run it as it is")
    ends = [value.name for value in branch.output]
    made = {name for proto in branch.node for name in proto.output}
    if not set(ends) <= made:
        raise BundleError("the model's branch for a filled cache gives back what it did not make", "run it as it is")
    graph.remove(node)
    try:
        for tensor in branch.initializer:
            graph.add_stored(tensor)
        for proto in branch.node:
            graph.add_proto(proto)
        for name, output in zip(ends, node.outputs, strict=True):
            graph.rename(name, output)
        graph.drop_identities()
    except ValueError as error:
        raise BundleError(f"the model's branches clash: {error}", "run it as it is") from error
