"""What a quantized KV cache and an int8 prompt graph cost in quality: logits compared with the unchanged model's.

Of two caches, the logits at every position of some texts are compared. After a prompt that the int8 graph read, the
model's own graph goes on from there, as in an answer. The next tokens come from the text, so that both see the
same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..graph.bound_graph import BoundGraph
from ..prefill import prefill
from ..text.tokenizer import TextTokenizer
from .exactness import SAMPLE_TEXT

KL_LIMIT: Final = 0.02
"""Mean KL divergence in nats up to which an int8 graph is used. Four bits differ from float32 by 0.02 to 0.2 in small
models (docs/log.md), so what an int8 graph may add is at most about as much as the smallest of that."""
PROMPTS: Final = 20
_PROMPT_TOKENS: Final = 96
_NEXT_TOKENS: Final = 64
_WIDTH: Final = 32
"""Tokens per pass. Their logits are compared at once: 20 MB of them for a vocabulary of 152,000."""
_SOURCES: Final = ("conversation", "decode", "embedding", "engine", "generation", "loaded_model", "options", "result")
"""Modules of the runtime whose source is read as text: half English prose, half code."""


@dataclass(frozen=True)
class LogitQuality:
    """Next-token distributions compared with the distributions of the unchanged model."""

    mean_kl: float
    """Mean KL divergence, in nats."""
    p99_kl: float
    """KL divergence that 99 % of the positions stay below."""
    top1_agreement: float
    """Share of the positions with the same most likely token."""
    positions: int
    """Number of positions that were compared."""
    longest: int
    """Number of tokens of the longest text."""


def _compared(expected: npt.NDArray[Any], found: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """KL divergence of log-probabilities `[n, V]` from the expected ones, and whether the best token is the same."""
    kl = (np.exp(expected) * (expected - found)).sum(axis=-1, dtype=np.float64)
    return kl, expected.argmax(axis=-1) == found.argmax(axis=-1)


def _quality(
    compared: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]], texts: Sequence[Sequence[int]]
) -> LogitQuality:
    kl, agrees = (np.concatenate(each) for each in zip(*compared, strict=True))
    return LogitQuality(
        float(kl.mean()), float(np.quantile(kl, 0.99)), float(agrees.mean()), kl.size, max(map(len, texts))
    )


def measure_cache_quality(
    quantized: BoundGraph,
    reference: BoundGraph,
    texts: Sequence[Sequence[int]],
    progress: Callable[[float], None] = lambda _: None,
) -> LogitQuality:
    """Compare the logits of two graphs, which differ in their caches, at every position of texts.

    Args:
        quantized: the graph with a quantized cache, whose contents are lost.
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
    compared = []
    for number, text in enumerate(cut):
        for each in (quantized, reference):
            each.arena.rewind_to(0)
        for start in range(0, len(text), _WIDTH):
            tokens, log_probs = text[start : start + _WIDTH], []
            for each in (reference, quantized):
                log_probs.append(log_softmax(each.forward(tokens).astype(np.float64)))
                each.arena.commit(len(tokens))
            compared.append(_compared(*log_probs))
        progress((number + 1) / len(cut))
    return _quality(compared, cut)


def log_softmax(logits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Log-probabilities of logits, over their last axis."""
    logits = logits - logits.max(axis=-1, keepdims=True)
    log_probs: npt.NDArray[Any] = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return log_probs


def quality_prompts(tokenizer: TextTokenizer) -> list[list[int]]:
    """Texts to compare on, as token ids, each a prompt with the tokens that follow it.

    They are pieces of the package's own source; without that, of the sample text.
    """
    folder = Path(__file__).parents[1]
    files = [folder / f"{name}.py" for name in _SOURCES]
    texts = [SAMPLE_TEXT, *(file.read_text(encoding="utf-8") for file in files if file.is_file())]
    first = tokenizer.encode("", add_special_tokens=True)
    size = _PROMPT_TOKENS + _NEXT_TOKENS - len(first)
    pieces: list[list[int]] = []
    for text in texts:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        wanted = -(-(PROMPTS - 1) // len(_SOURCES)) if text is not SAMPLE_TEXT else 1
        # Spread over the text, so that imports are not all that is read of it.
        starts = np.linspace(0, max(len(tokens) - size, 0), wanted).astype(int).tolist()
        pieces += [[*first, *tokens[start : start + size]] for start in dict.fromkeys(starts)]
    return [piece for piece in pieces if len(piece) > 1][:PROMPTS]


def measure_int8_quality(
    int8: BoundGraph,
    plain: BoundGraph,
    prompts: Sequence[Sequence[int]],
    progress: Callable[[float], None] = lambda _: None,
) -> LogitQuality:
    """Compare an int8 graph with the model's own graph.

    Args:
        int8: the int8 graph, whose cache's contents are lost.
        plain: the model's own graph, whose cache's contents are lost. It also runs over the int8 graph's cache.
        prompts: texts as token ids, at least one of two tokens; those longer than the context are cut. Of each, the
            last 64 tokens, or half of a shorter one, are those after the prompt.
        progress: receives the fraction done, 0 to 1, before every pass; what it raises ends the comparison.

    Raises:
        EdgeError: ONNX Runtime failed.
        ValueError: there is no prompt.
    """
    arena, int8_arena = plain.arena, int8.arena
    limit = min(arena.limit, int8_arena.limit)
    texts = [list(text[:limit]) for text in prompts if len(text[:limit]) > 1]
    if not texts:
        raise ValueError("there is no prompt to compare on")
    compared = []
    try:
        for number, text in enumerate(texts):

            def report(fraction: float, number: int = number) -> None:
                progress((number + fraction) / len(texts))

            next_tokens = min(_NEXT_TOKENS, len(text) // 2)
            plain.use(arena)
            expected = [*_next_distributions(plain, plain, text, next_tokens, lambda done: report(done / 2))]
            plain.use(int8_arena)
            found = _next_distributions(int8, plain, text, next_tokens, lambda done: report((1 + done) / 2))
            compared += [_compared(right, wrong) for right, wrong in zip(expected, found, strict=True)]
    finally:
        plain.use(arena)
        arena.rewind_to(0)
        int8_arena.rewind_to(0)
    progress(1.0)
    return _quality(compared, texts)


def _next_distributions(
    reader: BoundGraph, plain: BoundGraph, text: Sequence[int], next_tokens: int, progress: Callable[[float], None]
) -> Iterator[npt.NDArray[np.float32]]:
    """Yield log-probabilities `[n, V]` after the last token of a prompt and the tokens that follow it.

    Args:
        reader: reads the prompt but for its last token, into its cache.
        plain: reads the rest, from the same cache.
        text: the prompt and `next_tokens` more tokens; nothing is predicted after the last one.
        next_tokens: number of positions.
        progress: receives the fraction done before every pass.
    """
    arena = reader.arena
    arena.rewind_to(0)
    start = len(text) - next_tokens - 1
    progress(0.0)
    if start:
        prefill(reader, text[:start])
    for begin in range(start, len(text) - 1, _WIDTH):
        progress((begin - start + _WIDTH) / (next_tokens + _WIDTH))
        tokens = text[begin : min(begin + _WIDTH, len(text) - 1)]
        logits = plain.forward(tokens)
        arena.commit(len(tokens))
        yield log_softmax(logits)
