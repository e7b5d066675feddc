"""What an int8 KV cache costs in quality: a model's logits with it, compared with those with a float cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..graph.bound_graph import BoundGraph

_WIDTH: Final = 32
"""Tokens per pass. Their logits are compared at once: 20 MB of them for a vocabulary of 152,000."""


@dataclass(frozen=True)
class CacheQuality:
    """Logits with an int8 cache compared with those with a float cache, at every position of some texts."""

    mean_kl: float
    """Mean KL divergence of the next token's distribution, in nats."""
    p99_kl: float
    """KL divergence that 99 % of the positions stay below."""
    top1_agreement: float
    """Share of the positions with the same most likely token."""
    positions: int
    """Number of positions that were compared."""
    longest: int
    """Number of tokens of the longest text."""


def measure_cache_quality(
    quantized: BoundGraph,
    reference: BoundGraph,
    texts: Sequence[Sequence[int]],
    progress: Callable[[float], None] = lambda _: None,
) -> CacheQuality:
    """Compare the logits of two graphs, which differ in their caches, over texts.

    Args:
        quantized: the graph with an int8 cache, whose contents are lost.
        reference: the same with a float cache, whose contents are lost.
        texts: token ids, at least one text; those longer than the context are cut.
        progress: receives the fraction done, 0 to 1.

    Raises:
        EdgeError: ONNX Runtime failed.
        ValueError: there is no text.
    """
    limit = min(quantized.arena.limit, reference.arena.limit)
    cut = [list(text[:limit]) for text in texts if len(text)]
    if not cut:
        raise ValueError("there is no text to compare caches on")
    kl, agrees = [], []
    for number, text in enumerate(cut):
        for found, expected in zip(_log_probs(quantized, text), _log_probs(reference, text), strict=True):
            kl.append(np.sum(np.exp(expected) * (expected - found), axis=-1))
            agrees.append(found.argmax(axis=-1) == expected.argmax(axis=-1))
        progress((number + 1) / len(cut))
    values = np.concatenate(kl)
    return CacheQuality(
        mean_kl=float(values.mean()),
        p99_kl=float(np.quantile(values, 0.99)),
        top1_agreement=float(np.concatenate(agrees).mean()),
        positions=values.size,
        longest=max(map(len, cut)),
    )


def _log_probs(bound: BoundGraph, text: Sequence[int]) -> Iterator[npt.NDArray[np.float64]]:
    """Yield the log-probabilities `[n, V]` after each token of a text, a pass at a time."""
    bound.arena.rewind_to(0)
    for start in range(0, len(text), _WIDTH):
        tokens = text[start : start + _WIDTH]
        logits = bound.forward(tokens).astype(np.float64)
        bound.arena.commit(len(tokens))
        logits -= logits.max(axis=-1, keepdims=True)
        yield logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
