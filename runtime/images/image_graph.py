"""The graph that takes features of images in place of embeddings, for passes that have any.

It is made from the model's own graph and runs beside it, over the same weights and the same cache. So passes over text
alone, drafting, shared passes and further graphs stay as they are (docs/decisions/0096-images.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...errors import BundleError
from ...models.onnx_file.graph_editor import CannotRewriteError, GraphEditor, onnx_node
from ...models.onnx_file.model_messages import tensor, value_info
from ..graph.bound_graph import NewTokens
from ..graph.graph_choice import FurtherGraph
from ..graph.model_metadata import ModelMetadata
from ..graph.session import GraphSession

FEATURES: Final = "image_features"
ROWS: Final = "image_rows"
_EMBEDDED: Final = ("embedded.scaled", "embedded", "embedded.joined")
"""Names of the embeddings in exported graphs, of which the first that exists is what the layers read."""


class ImageGraph(FurtherGraph):
    """The graph for passes with images.

    Args:
        graph: the file from which the model's own graph was loaded.
        own: that graph.
        metadata: what the files beside it say.
        hidden_size: channels of an embedding.
        bidirectional: whether the tokens of an image attend to each other.
    """

    name = "images"
    required = True

    def __init__(
        self, graph: Path, own: GraphSession, metadata: ModelMetadata, hidden_size: int, *, bidirectional: bool
    ) -> None:
        self._graph: Final = graph
        self._hidden_size: Final = hidden_size
        # Idle threads must not spin beside the threads of the model's own graph.
        self._config: Final = replace(own.config, shares_cores=True)
        self._metadata: Final = replace(metadata, probe_result=own.probe_result, first_pass_graph=None)
        self._bidirectional: Final = bidirectional

    def takes(self, new: NewTokens, base: int) -> bool:
        """Whether a pass has features of images."""
        del base
        return new.images is not None

    def inputs(self, new: NewTokens) -> Mapping[str, npt.NDArray[Any]]:
        """The features of a pass, and where they stand."""
        assert new.images is not None  # noqa: S101  it takes no other passes
        rows = np.stack([np.zeros_like(new.images.rows), new.images.rows], axis=1)
        return {FEATURES: np.ascontiguousarray(new.images.features), ROWS: rows}

    def load(self) -> GraphSession:
        """Make the graph and load it.

        Raises:
            BundleError: it cannot be made or loaded.
        """
        try:
            model = image_graph(self._graph, self._hidden_size, bidirectional=self._bidirectional)
        except CannotRewriteError as error:
            raise BundleError(f"{self._graph} cannot take images: {error}", "export it with edge-run export") from error
        return GraphSession(self._graph, self._config, self._metadata, model=model)


def image_graph(graph: Path, hidden_size: int, *, bidirectional: bool) -> bytes:
    """A decoder graph with two more inputs: `image_features` float32 `[1, N, hidden]`, which take the place of the
    embeddings at `image_rows` int64 `[N, 2]`, each 0 and the index of a new token.

    Args:
        graph: the model file; the result refers to the same weights, relative to its folder.
        hidden_size: channels of an embedding.
        bidirectional: whether the caller's bias alone says which of the new tokens attend to later ones.

    Raises:
        BundleError: the file is not an ONNX model.
        CannotRewriteError: the graph is not one that edge-run has exported, or has attention that cannot do so.
    """
    editor = GraphEditor(graph)
    embedded = next((name for name in _EMBEDDED if editor.producer(name) is not None), None)
    if embedded is None:
        raise CannotRewriteError("its embedding is not known")
    # Inputs with defaults: the graph has the same inputs as the model's own where they are not bound.
    for name, default in ((FEATURES, np.zeros((1, 0, hidden_size), np.float32)), (ROWS, np.zeros((0, 2), np.int64))):
        shape: list[int | str] = [1, "N", hidden_size] if name == FEATURES else ["N", 2]
        editor.graph.input.append(value_info(name, default.dtype, shape))
        editor.add(tensor(name, default))
    for each in editor.graph.node:
        each.input[:] = [f"{name}.seen" if name == embedded else name for name in each.input]
    rows = onnx_node("Squeeze", [FEATURES, editor.integers("images.axes", 0)], "image_features.rows")
    seen = onnx_node("ScatterND", [embedded, ROWS, "image_features.rows"], f"{embedded}.seen")
    editor.rewrite(lambda each: [each, rows, seen] if embedded in each.output else [each])
    if not bidirectional:
        return editor.serialized()
    from ..long_context.dense_attention import dense_graph  # noqa: PLC0415 -- one family needs it

    return dense_graph(editor, causal=False)
