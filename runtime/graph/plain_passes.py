"""Two graphs of one model over one cache: one for passes of consecutive tokens, one for token trees.

Some providers have a fast attention kernel that takes no bias. Prefill, plain decoding and chains of draft tokens need
none, because attention is causal itself, so they run in a graph without one. Trees run in the graph with a bias, whose
session has a copy of the weights; it is loaded when the first tree is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import numpy as np

from ...models.onnx_file.model_messages import ELEMENT_TYPES, Message, ModelProto, read_model, shape_of
from .bound_graph import NewTokens
from .graph_choice import FurtherGraph
from .graph_io import NUMPY_TYPES, GraphIO, GraphValue, InputRole
from .introspection import introspect
from .model_metadata import ModelMetadata
from .session import GraphSession

_TYPE_NAMES: Final = {ELEMENT_TYPES[dtype]: name for name, dtype in NUMPY_TYPES.items()}
"""ONNX Runtime's name of a tensor type, by ONNX's number of its element type."""


def is_consecutive(new: NewTokens, base: int) -> bool:
    """Whether positions behind `base` are consecutive, and each token attends to all before it, given or not."""
    ids, _, positions, tree_mask, _ = new
    if positions is not None and not np.array_equal(
        np.broadcast_to(np.asarray(positions, np.int64), len(ids)), np.arange(base, base + len(ids))
    ):
        return False
    return tree_mask is None or np.array_equal(
        tree_mask, np.tri(len(ids), tree_mask.shape[1], tree_mask.shape[1] - len(ids), dtype=np.bool_)
    )


class TreeGraph(FurtherGraph):
    """The graph for token trees, beside one without a bias.

    Args:
        load: loads it.
    """

    name = "trees"
    required = True

    def __init__(self, load: Callable[[], GraphSession]) -> None:
        self._load: Final = load

    def takes(self, new: NewTokens, base: int) -> bool:
        """Whether a pass is over a tree. Consecutive tokens need neither mask nor positions."""
        return not is_consecutive(new, base)

    def load(self) -> GraphSession:
        """Load the graph."""
        return self._load()


def runs_trees_beside(plain: GraphIO, trees: GraphIO) -> bool:
    """Whether the one graph has no bias, and the other computes trees over the same cache; neither needs probing."""
    selected = all(InputRole.LOGIT_POSITIONS in each.inputs for each in (plain, trees))
    same_cache = plain.tensor_types == trees.tensor_types
    return selected and same_cache and InputRole.BIAS not in plain.inputs and trees.supports_trees


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
