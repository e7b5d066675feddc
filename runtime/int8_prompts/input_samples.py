"""Runs a model over a short text, and keeps what its products have as inputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from ...models.bundle import Bundle
from ...models.onnx_file.graph_editor import GraphEditor
from ...models.onnx_file.model_messages import value_info
from ..graph.model_metadata import metadata_of
from ..graph.session import GraphSession, SessionConfig
from ..measure.exactness import SAMPLE_TEXT
from ..text.tokenizer import TextTokenizer
from .outlier_channels import InputSample

_WIDTH: Final = 32
"""Tokens per pass: the inputs of all products of one are in memory at once, 23 MB for a model of 0.5B."""
_PASSES: Final = 4
_KEPT: Final = 8
"""One of so many tokens is kept, the first one among them: it often has the largest outliers."""


def sample_inputs(
    editor: GraphEditor, source: Path, bundle: Bundle, config: SessionConfig, channels: Mapping[str, int]
) -> dict[str, InputSample]:
    """Inputs of products over the sample text.

    Args:
        editor: a graph of the model, of which the values become outputs.
        source: a file in the folder of its data files.
        bundle: the model.
        config: how its graph is run.
        channels: names of the inputs, and their numbers of channels.

    Raises:
        BundleError: the graph or the tokenizer cannot be loaded.
        EdgeError: ONNX Runtime failed.
    """
    for name, size in channels.items():
        editor.graph.output.append(value_info(name, np.float32, (1, "tokens", size)))
    session = GraphSession(source, config, metadata_of(bundle), model=editor.serialized())
    vocabulary = session.graph_io.vocab_size
    text = TextTokenizer(bundle, vocabulary).encode(SAMPLE_TEXT, add_special_tokens=True) or [0]
    limit = min(_PASSES * _WIDTH, bundle.context or _PASSES * _WIDTH)
    tokens = np.resize(np.array(text), max(limit // _WIDTH, 1) * _WIDTH)
    bound = session.bind(session.arena(tokens.size))
    values = {name: np.zeros((1, _WIDTH, size), np.float32) for name, size in channels.items()}
    for name, array in values.items():
        bound.observe(name, array)
    largest = {name: np.zeros(size, np.float32) for name, size in channels.items()}
    kept: dict[str, list[np.ndarray]] = {name: [] for name in channels}
    for start in range(0, tokens.size, _WIDTH):
        bound.forward(tokens[start : start + _WIDTH], logits_for=(_WIDTH - 1,))
        bound.arena.commit(_WIDTH)
        for name, array in values.items():
            np.maximum(largest[name], np.abs(array[0]).max(axis=0), out=largest[name])
            kept[name].append(array[0, ::_KEPT].copy())
    return {name: InputSample(largest[name], np.concatenate(kept[name])) for name in channels}
