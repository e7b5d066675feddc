"""Embeddings of texts: their tokens' last hidden states, pooled and normalized."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import BundleError, ContextError, EdgeError, InputError
from ..models.bundle import POOLING_NAME, SENTENCE_POOLING, Bundle
from ..models.find import model_name
from .graph.bound_graph import BoundGraph
from .loaded_model import LoadedModel
from .prefill import PREFILL_TOKENS
from .scheduling.request_queue import RequestQueue

_MODES: Final[Mapping[str, str]] = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
"""Flags of sentence-transformers' pooling config that edge-run supports, and what newer versions write instead."""
DECODER_POOLING: Final = ("lasttoken", "mean")
"""Pooling of causal models, where the last token is the only one that has read the whole text."""


def pooling_mode(config: Mapping[str, Any], name: str, supported: Sequence[str] = DECODER_POOLING) -> str:
    """How the states of a text's tokens become one vector: by their mean, or the first (cls) or last stands for it.

    Args:
        config: the pooling config of sentence-transformers.
        name: the name of its file.
        supported: what the model can have.

    Raises:
        InputError: it says something else.
    """
    mode = config.get("pooling_mode")
    chosen = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    modes = [mode] if isinstance(mode, str) else [_MODES.get(key, key) for key in chosen]
    if len(modes) != 1 or modes[0] not in supported:
        raise InputError(
            f"{name} asks for the pooling {' and '.join(modes) or 'of nothing'}",
            f"edge-run supports {' and '.join(supported)} here",
        )
    return modes[0]


def pooling_of(bundle: Bundle, supported: Sequence[str] = DECODER_POOLING) -> str:
    """The pooling that a model's files ask for; the first of `supported` where they do not say; errors as above."""
    name = next((each for each in (SENTENCE_POOLING, POOLING_NAME) if bundle.file(each) is not None), None)
    return supported[0] if name is None else pooling_mode(bundle.json_file(name), name, supported)


def embed_texts(
    model: LoadedModel, texts: Sequence[str | Sequence[int]], cancelled: Callable[[], bool]
) -> npt.NDArray[np.float32]:
    """Embed texts; see `Engine.embed`.

    Args:
        model: the model, whose graph gives hidden states.
        texts: the texts, or their token ids.
        cancelled: called before every forward pass.
    """
    size = model.graph_io.hidden_size
    if size is None:
        raise InputError(
            f"{model_name(model.bundle.folder)} does not give hidden states, which embeddings are made of",
            "export the model with --hidden-states",
        )
    mean = pooling_of(model.bundle) == "mean"
    encode = partial(model.tokenizer.encode, add_special_tokens=True)
    prompts = checked_token_ids(texts, encode, "text", model.context, model.graph_io.input_vocab)
    if not prompts:
        return np.empty((0, size), np.float32)
    bound = model.new_sequence(hidden_states=True).bound
    return np.stack(
        [unit_vector(_pooled(bound, token_ids, model.queue, cancelled, mean=mean)) for token_ids in prompts]
    )


def checked_token_ids(
    texts: Sequence[str | Sequence[int]], encode: Callable[[str], list[int]], what: str, room: int, most: int
) -> list[list[int]]:
    """The token ids of texts, or of those given, which must be below `most`.

    Raises:
        ContextError: one of the texts has more than `room` tokens; `what` says what they are.
        InputError: one is empty, or has another token id.
    """
    found = [encode(each) if isinstance(each, str) else list(each) for each in texts]
    for index, token_ids in enumerate(found):
        if not token_ids:
            raise InputError(f"{what} {index} is empty", "give at least one character")
        if (tokens := len(token_ids)) > room:
            raise ContextError(f"{what} {index} has {tokens} tokens and the context has room for {room}", "split it")
        if min(token_ids) < 0 or max(token_ids) >= most:
            raise InputError(f"{what} {index} has a token id that the model does not", f"they are 0 to {most - 1}")
    return found


def unit_vector(vector: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float32]:
    """A vector divided by its length.

    Raises:
        BundleError: it is zero or not finite.
    """
    length = float(np.linalg.norm(vector.astype(np.float64)))
    if not 0 < length < np.inf:
        raise BundleError(
            "the model computes hidden states that are zero or not finite",
            "its weights are damaged: copy, download or export the model again",
        )
    return (vector / length).astype(np.float32)


def _pooled(
    bound: BoundGraph, token_ids: Sequence[int], queue: RequestQueue, cancelled: Callable[[], bool], *, mean: bool
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
        with queue.turn():
            hidden = bound.hidden_states(chunk, wanted)
            arena.commit(len(chunk))
        if mean:
            total += hidden.sum(axis=0, dtype=np.float64)
    return total / len(token_ids) if mean else hidden[-1]
