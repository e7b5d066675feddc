"""Prefill: computes the KV cache of a prompt in wide passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np

from ..models.progress import Progress, shown_by_name, silent
from .graph.bound_graph import BoundGraph
from .sampling.logit_stage import Logits

PREFILL_TOKENS: Final = 128
"""Prompt tokens per pass: wide enough for efficient matrix products (256 gains under 2 %), small enough to bound the
memory of the activations and to let a prompt be cancelled soon."""

INT8_GRAPH: Final = "int8"
"""Name of the int8 prompt graph in statistics; see `BoundGraph.last_graph`."""

READING_PROMPT: Final = "reading the prompt"
"""Stage of the progress that a prefill reports."""


class PrefillMode(StrEnum):
    """Which graph reads prompts on the CPU."""

    AUTO = "auto"
    """The int8 prompt graph, where it was measured to be faster and as good; else the model's own graph."""
    PLAIN = "plain"
    """The model's own graph."""
    INT8 = "int8"
    """The int8 prompt graph for all passes that it can run."""


class PrefillResult(NamedTuple):
    """What a prefill found."""

    logits: Logits
    """Logits float32 `[V]` after the last token, valid until the next pass; empty if every slot was there already."""
    passes: int
    tokens_by_graph: Mapping[str, int]
    """Number of tokens that each graph read, by its name (`BoundGraph.last_graph`)."""


class Cancelled(Exception):  # noqa: N818  not an error
    """Decoding was cancelled between two passes; the cache holds a valid beginning of the sequence."""


@shown_by_name
def never() -> bool:
    """Return False: the default of `cancelled` arguments."""
    return False


def prefill(
    bound: BoundGraph,
    token_ids: Sequence[int],
    cancelled: Callable[[], bool] = never,
    progress: Progress = silent,
    *,
    width: int | None = None,
) -> PrefillResult:
    """Compute the cache slots of `token_ids` that the arena does not hold yet.

    Args:
        bound: the session; its arena holds the slots of `token_ids[:arena.length]`.
        token_ids: the whole sequence.
        cancelled: called before every pass; True ends the prefill.
        progress: receives the share of the missing slots that are computed, before every pass and at the end.
        width: tokens per pass; `PREFILL_TOKENS`, or what suits the graph, when None.

    Raises:
        Cancelled: `cancelled` returned True.
        ContextError: the sequence does not fit the context.
        EdgeError: ONNX Runtime failed.
    """
    arena = bound.arena
    arena.expect(len(token_ids) - arena.length)
    logits: Logits = np.empty((1, 0), np.float32)
    passes = 0
    tokens_by_graph: dict[str, int] = {}
    first = arena.length
    while arena.length < len(token_ids):
        if cancelled():
            raise Cancelled
        progress(READING_PROMPT, (arena.length - first) / (len(token_ids) - first))
        chosen = width or bound.prefill_width(PREFILL_TOKENS, len(token_ids) - arena.length)
        if bound.images is not None:
            chosen = bound.images.pass_width(arena.length, chosen)
        chunk = token_ids[arena.length : arena.length + chosen]
        # Only the last pass reads the weights of the LM head, where the graph can leave logits out.
        is_last = arena.length + len(chunk) == len(token_ids)
        logits = bound.forward(chunk, logits_for=(len(chunk) - 1,) if is_last else ())
        arena.commit(len(chunk))
        graph = bound.last_graph
        tokens_by_graph[graph] = tokens_by_graph.get(graph, 0) + len(chunk)
        arena.last_prefill = (arena.length - len(chunk), arena.length)
        passes += 1
    if passes:
        progress(READING_PROMPT, 1.0)
    return PrefillResult(logits[0], passes, tokens_by_graph)
