"""Embeddings of texts: their tokens' last hidden states, pooled and normalized."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import BundleError, ContextError, EdgeError, InputError
from ..models.bundle import POOLING_NAME, SENTENCE_POOLING
from ..models.find import model_name
from .graph.bound_graph import BoundGraph
from .loaded_model import LoadedModel
from .prefill import PREFILL_TOKENS

Turn = Callable[[], AbstractContextManager[None]]
"""A context in which no answer of the engine runs a pass."""

_MODES: Final[Mapping[str, str]] = {"pooling_mode_lasttoken": "lasttoken", "pooling_mode_mean_tokens": "mean"}
"""Flags of sentence-transformers' pooling config that edge-run supports, and what newer versions write instead."""


def is_mean_pooled(config: Mapping[str, Any], name: str) -> bool:
    """Whether the states of a text's tokens become one vector by their mean, or the last one stands for the text.

    The last token is the only one that has read the whole text, as attention is causal.

    Args:
        config: the pooling config of sentence-transformers.
        name: the name of its file.

    Raises:
        InputError: it says something that edge-run does not support.
    """
    mode = config.get("pooling_mode")
    chosen = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    modes = [mode] if isinstance(mode, str) else [_MODES.get(key, key) for key in chosen]
    if len(modes) != 1 or modes[0] not in _MODES.values():
        raise InputError(
            f"{name} asks for the pooling {' and '.join(modes) or 'of nothing'}",
            f"edge-run supports {' and '.join(_MODES)}",
        )
    return modes[0] == "mean"


def embed_texts(
    model: LoadedModel, texts: Sequence[str | Sequence[int]], turn: Turn, cancelled: Callable[[], bool]
) -> npt.NDArray[np.float32]:
    """Embed texts; see `Engine.embed`.

    Args:
        model: the model, whose graph gives hidden states.
        texts: the texts, or their token ids.
        turn: entered for every forward pass.
        cancelled: called before every forward pass.
    """
    size = model.graph_io.hidden_size
    if size is None:
        raise InputError(
            f"{model_name(model.bundle.folder)} does not give hidden states, which embeddings are made of",
            "export the model with --hidden-states",
        )
    name = next((each for each in (SENTENCE_POOLING, POOLING_NAME) if model.bundle.file(each) is not None), None)
    mean = name is not None and is_mean_pooled(model.bundle.json_file(name), name)
    prompts = [
        model.tokenizer.encode(text, add_special_tokens=True) if isinstance(text, str) else list(text) for text in texts
    ]
    most = model.graph_io.input_vocab
    for index, token_ids in enumerate(prompts):
        if not token_ids:
            raise InputError(f"text {index} is empty", "give at least one character")
        if (tokens := len(token_ids)) > model.context:
            raise ContextError(
                f"text {index} has {tokens} tokens and the model's context is {model.context}", "split it"
            )
        if min(token_ids) < 0 or max(token_ids) >= most:
            raise InputError(f"text {index} has a token id that the model does not", f"they are 0 to {most - 1}")
    embeddings = np.empty((len(prompts), size), np.float32)
    if prompts:
        bound = model.new_sequence(hidden_states=True).bound
        for row, token_ids in zip(embeddings, prompts, strict=True):
            vector = _pooled(bound, token_ids, turn, cancelled, mean=mean)
            length = float(np.linalg.norm(vector.astype(np.float64)))
            if not 0 < length < np.inf:
                raise BundleError(
                    "the model computes hidden states that are zero or not finite",
                    "its weights are damaged: copy, download or export the model again",
                )
            row[:] = vector / length
    return embeddings


def _pooled(
    bound: BoundGraph, token_ids: Sequence[int], turn: Turn, cancelled: Callable[[], bool], *, mean: bool
) -> npt.NDArray[np.floating[Any]]:
    """The pooled hidden states `[d]` of a text.

    Raises:
        EdgeError: the caller cancelled.
    """
    arena = bound.arena
    arena.rewind_to(0)
    total = np.zeros(bound.graph_io.hidden_size or 0, np.float64)
    hidden = np.empty((0, total.size), np.float32)
    width = min(PREFILL_TOKENS, bound.graph_io.widest_pass or PREFILL_TOKENS)
    width = width if bound.graph_io.supports_wide_passes else 1
    while arena.length < len(token_ids):
        if cancelled():
            raise EdgeError("the embedding was cancelled")
        chunk = token_ids[arena.length : arena.length + width]
        # A graph that selects positions gives hidden states, like logits, of the selected ones only.
        wanted = range(len(chunk)) if mean else (len(chunk) - 1,)
        with turn():
            hidden = bound.hidden_states(chunk, wanted)
            arena.commit(len(chunk))
        if mean:
            total += hidden.sum(axis=0, dtype=np.float64)
    return total / len(token_ids) if mean else hidden[-1]
