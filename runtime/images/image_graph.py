"""The graph that takes features of images in place of embeddings, for passes that have any.

It is made from the model's own graph and runs beside it, over the same weights and the same cache. So passes over text
alone, drafting, shared passes and further graphs stay as they are (docs/decisions/0096-images.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ...errors import BundleError
from ...models.onnx_file.graph_editor import EMBEDDINGS, CannotRewriteError, GraphEditor, onnx_node
from ...models.onnx_file.model_messages import Message, tensor, value_info
from ..graph.attention_edits import rotate_outside
from ..graph.bound_graph import NewTokens
from ..graph.graph_choice import IMAGES, FurtherGraph
from ..graph.graph_io import GraphForm
from ..graph.session import GraphSession
from .image_processor import ImageProcessor

FEATURES: Final = "image_features"
ROWS: Final = "image_rows"
ROTARY: Final = ("rotary_cosines", "rotary_sines")
Tables: TypeAlias = tuple[npt.NDArray[Any], npt.NDArray[Any]]
_EMBEDDED: Final = ("embedded.scaled", "embedded", "embedded.joined", EMBEDDINGS)
"""Names of the embeddings in exported graphs, of which the first that exists is what the layers read."""


class ImageGraph(FurtherGraph):
    """The graph for passes with images.

    Args:
        form: the model's own graph.
        hidden_size: channels of an embedding.
        processor: the model's image processor.
    """

    name = IMAGES
    required = True

    def __init__(self, form: GraphForm, hidden_size: int, processor: ImageProcessor) -> None:
        self._form: Final = form
        self._hidden_size: Final = hidden_size
        self._processor: Final = processor
        self._tables: Tables | None = None
        """Cosines and sines `[positions, pairs]` of the graph, where positions have three axes."""

    def takes(self, new: NewTokens, base: int) -> bool:
        """Whether a pass has features of images."""
        del base
        return new.images is not None

    def inputs(self, new: NewTokens) -> Mapping[str, npt.NDArray[Any]]:
        """The features of a pass, and where they stand."""
        assert new.images is not None  # noqa: S101  it takes no other passes
        rows = np.stack([np.zeros_like(new.images.rows), new.images.rows], axis=1)
        inputs = {FEATURES: np.ascontiguousarray(new.images.features), ROWS: rows}
        axes, positions = None if self._tables is None else self._processor.axes, new.images.positions
        if axes is not None and positions is not None and self._tables is not None:
            pairs = np.arange(axes.size)
            inputs |= {name: table[positions[axes].T, pairs] for name, table in zip(ROTARY, self._tables, strict=True)}
        return inputs

    def load(self, base: GraphSession) -> GraphSession:
        """Make the graph and load it.

        Raises:
            BundleError: it cannot be made or loaded.
        """
        if FEATURES in base.optional_inputs:  # as if its embedding was a graph of its own
            return base
        graph, serialized = self._form
        try:
            model, self._tables = image_graph(graph, self._hidden_size, self._processor, serialized)
        except CannotRewriteError as error:
            raise BundleError(f"{graph} cannot take images: {error}", "export it with edge-run export") from error
        return base.beside(graph, model)


def image_graph(
    graph: Path, hidden_size: int, processor: ImageProcessor | None, model: bytes | None
) -> tuple[bytes, Tables | None]:
    """A decoder graph with two more inputs: `image_features` float32 `[1 + L, N, hidden]`, of which the first take the
    place of the embeddings at `image_rows` int64 `[N, 2]`, each 0 and the index of a new token. The others are added to
    the outputs of the first L layers there.

    Where tokens of an image attend to each other, the caller's bias alone says which of the new tokens attend to later
    ones. Where positions have axes, the cosines and sines of the new tokens are inputs too, `ROTARY` `[M, pairs]`.

    Args:
        graph: the model file; the result refers to the same weights, relative to its folder.
        hidden_size: channels of an embedding.
        processor: the model's image processor, which says how many layers have features, L; None for a graph that has
            nothing but the two inputs.
        model: the serialized graph where it differs from the file.

    Returns:
        The graph, and the cosines and sines by position that the model's own has.

    Raises:
        BundleError: the file is not an ONNX model.
        CannotRewriteError: the graph is not one that edge-run has exported, or has attention that cannot do so.
    """
    editor = GraphEditor(graph, model)
    _take_features(editor, hidden_size, 0 if processor is None else processor.layers)
    if processor is None:
        return editor.serialized(), None
    if processor.bidirectional:
        from ..long_context.dense_attention import dense_graph  # noqa: PLC0415 -- one family needs it

        return dense_graph(editor, causal=False), None
    tables = _rotate_by_inputs(editor) if processor.has_axes else None
    return editor.serialized(), tables


def _take_features(editor: GraphEditor, hidden_size: int, layers: int) -> None:
    """Let features of images take the place of embeddings, and be added to the outputs of the first `layers` layers.

    Raises:
        CannotRewriteError: the graph is not one that edge-run has exported.
    """
    embedded = next((name for name in _EMBEDDED if editor.producer(name) is not None), None)
    if embedded is None:
        raise CannotRewriteError("its embedding is not known")
    _add_input(editor, FEATURES, [1 + layers, "N", hidden_size], np.zeros((1 + layers, 0, hidden_size), np.float32))
    _add_input(editor, ROWS, ["N", 2], np.zeros((0, 2), np.int64))
    names = [f"layers.{layer}.next_norm" for layer in range(layers)]
    ends = [editor.producer(name) or editor.producer(f"{name}.residual") for name in names]
    changed = [embedded, *(each.input[0] for each in ends if each is not None)]
    if len(changed) != 1 + layers:
        raise CannotRewriteError("its layers are not known")
    for each in editor.graph.node:
        each.input[:] = [f"{name}.seen" if name in changed else name for name in each.input]

    types = {each.name: each.type.tensor_type.elem_type for each in editor.graph.value_info}

    def seen(each: Message) -> Iterator[Message]:
        yield each
        for output in filter(changed.__contains__, each.output):
            number = changed.index(output)
            rows, cast = f"{FEATURES}.{number}", f"{FEATURES}.{number}.cast"
            at = editor.constant(f"images.{number}", np.array(number, np.int64))
            yield onnx_node("Gather", [FEATURES, at], rows, axis=0)
            # Graphs of other tools state their types, and may be older than CastLike.
            known = types.get(output)
            yield (onnx_node("Cast", [rows], cast, to=known) if known else onnx_node("CastLike", [rows, output], cast))
            how = "add" if number else "none"
            yield onnx_node("ScatterND", [output, ROWS, cast], f"{output}.seen", reduction=how)

    editor.rewrite(seen)


def _add_input(editor: GraphEditor, name: str, shape: list[int | str], default: npt.NDArray[Any]) -> None:
    """Add an input that need not be bound."""
    editor.graph.input.append(value_info(name, default.dtype, shape))
    editor.add(tensor(name, default))


def _rotate_by_inputs(editor: GraphEditor) -> Tables:
    """Let queries and keys be rotated by inputs; returns the cosines and sines that rotated them before.

    Raises:
        CannotRewriteError: they are not constants, or differ between layers.
    """
    rotate_outside(editor)
    rotations = [each for each in editor.graph.node if each.op_type == "RotaryEmbedding"]
    names = {tuple(each.input[2:4]) for each in rotations}
    tables = [editor.array(name) for pair in names for name in pair]
    if len(tables) != 2 or tables[0] is None or tables[1] is None:
        raise CannotRewriteError("its rotation is not known")
    pairs = tables[0].shape[1]
    for name in ROTARY:
        _add_input(editor, name, ["M", pairs], np.zeros((1, pairs), np.float32))
    first = editor.integers("images.first", 0)  # a number alone is the row of the first token
    for each in rotations:
        each.input[1:4] = [first, *ROTARY]
    return tables[0], tables[1]
