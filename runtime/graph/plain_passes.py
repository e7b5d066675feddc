"""Two graphs of one model over one cache: one for passes of consecutive tokens, one for token trees.

Some providers have a fast attention kernel that takes no bias. Prefill, plain decoding and chains of draft tokens need
none, because attention is causal itself, so they run in a graph without one. Trees run in the graph with a bias, whose
session has a copy of the weights; it is loaded when the first tree is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from ...models.onnx_file.model_messages import ELEMENT_TYPES, Message, ModelProto, read_model, shape_of
from .graph_choice import FurtherGraph, PassRequest
from .graph_io import GraphIO, GraphValue, InputRole
from .introspection import introspect
from .model_metadata import ModelMetadata
from .session import GraphSession

_TYPE_NAMES: Final = {
    number: f"tensor({({'float32': 'float', 'float64': 'double'}).get(dtype.name, dtype.name)})"
    for dtype, number in ELEMENT_TYPES.items()
}
"""ONNX Runtime's name of a tensor type, by ONNX's number of its element type."""


class TreeGraph(FurtherGraph):
    """The graph for token trees, beside one without a bias.

    Args:
        load: loads it.
    """

    name = "trees"
    required = True

    def __init__(self, load: Callable[[], GraphSession]) -> None:
        self._load: Final = load

    def takes(self, request: PassRequest) -> bool:
        """Whether a pass is over a tree. Consecutive tokens need neither mask nor positions."""
        return not request.is_consecutive

    def load(self) -> GraphSession:
        """Load the graph."""
        return self._load()


def runs_trees_beside(plain: GraphIO, trees: GraphIO) -> bool:
    """Whether the one graph has no bias, and the other computes trees over the same cache; neither needs probing."""
    selected = all(InputRole.LOGIT_POSITIONS in each.inputs for each in (plain, trees))
    same_cache = plain.tensor_types == trees.tensor_types
    return selected and same_cache and not plain.has_bias_input and trees.supports_trees


def read_graph_io(graph: Path, model: bytes | None, metadata: ModelMetadata) -> GraphIO:
    """The inputs and outputs of a graph that is not loaded.

    Args:
        graph: its file.
        model: the serialized graph where it differs from the file.
        metadata: what the files beside it say.

    Raises:
        BundleError: the file is not a decoder that edge-run can run.
    """
    proto = (read_model(graph) if model is None else ModelProto.FromString(model)).graph
    constants = {each.name for each in proto.initializer}
    inputs = _values(each for each in proto.input if each.name not in constants)
    return introspect(inputs, _values(proto.output), str(graph), metadata)


def _values(infos: Iterable[Message]) -> list[GraphValue]:
    return [
        GraphValue(each.name, _TYPE_NAMES.get(each.type.tensor_type.elem_type, ""), shape_of(each)) for each in infos
    ]
