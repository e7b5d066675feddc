"""What a quantized KV cache and an int8 prompt graph cost in quality: logits compared with the unchanged model's.

Of two caches, the logits at every position of some texts are compared. After a prompt that the int8 graph read, the
model's own graph goes on from there, as in an answer. The next tokens come from the text, so that both see the
same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
_WIDTH: Final = 16
"""Tokens per pass. Their logits are compared at once: 20 MB as float64 for a vocabulary of 152,000."""
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


def measure_quality(
    changed: BoundGraph,
    reference: BoundGraph,
    texts: Sequence[Sequence[int]],
    progress: Callable[[float], None] = lambda _: None,
    *,
    prompts: bool = False,
) -> LogitQuality:
    """Compare the logits of two graphs over texts.

    Args:
        changed: the graph with a quantized cache, or the int8 prompt graph; its cache's contents are lost.
        reference: the model's own graph with a float cache, whose contents are lost.
        texts: token ids, at least one text; those longer than the context are cut.
        progress: receives the fraction done, 0 to 1, before every pass; what it raises ends the comparison.
        prompts: whether both read prompts only, after which the reference goes on, over whose cache `changed` runs from
            now on. The last 64 tokens of a text, or half of a shorter one, are those after the prompt; a text has at
            least two tokens. Otherwise the logits at every position are compared.

    Raises:
        EdgeError: ONNX Runtime failed.
        ValueError: there is no text.
    """
    if prompts:
        changed.use(reference.arena)
    limit = min(changed.arena.limit, reference.arena.limit)
    # Nothing is predicted after the last token, and the own graph reads the last one of a prompt.
    cut = [list(text[:limit])[: -1 if prompts else None] for text in texts]
    cut = [text for text in cut if text]
    if not cut:
        raise ValueError("there is no text to compare on")
    kl: list[float] = []
    agrees: list[bool] = []
    for number, text in enumerate(cut):
        step = partial(progress, number / len(cut))
        start = len(text) - min(_NEXT_TOKENS, (len(text) + 1) // 2) if prompts else 0
        expected: Iterable[npt.NDArray[Any]] = _logits(reference, reference, start, text, step)
        if prompts:  # over one cache, so one after the other
            expected = list(expected)
        for pair in zip(expected, _logits(changed, reference if prompts else changed, start, text, step), strict=True):
            right, wrong = (log_softmax(each.astype(np.float64)) for each in pair)
            kl += (np.exp(right) * (right - wrong)).sum(axis=-1).tolist()
            agrees += (right.argmax(axis=-1) == wrong.argmax(axis=-1)).tolist()
    progress(1.0)
    p99 = float(np.quantile(kl, 0.99))
    return LogitQuality(float(np.mean(kl)), p99, float(np.mean(agrees)), len(kl), max(map(len, cut)))


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


def _logits(
    reader: BoundGraph, plain: BoundGraph, start: int, text: Sequence[int], step: Callable[[], None]
) -> Iterator[npt.NDArray[Any]]:
    """Yield logits `[n, V]` of the tokens of a text from the index `start` on.

    Args:
        reader: reads those before it, as a prompt.
        plain: reads the others, from the same cache.
        start: index of the first token of which logits are wanted.
        text: the token ids.
        step: called before every pass.
    """
    arena = plain.arena
    arena.rewind_to(0)
    step()
    prefill(reader, text[:start])
    for begin in range(start, len(text), _WIDTH):
        step()
        logits = plain.forward(text[begin : begin + _WIDTH])
        arena.commit(len(logits))
        yield logits.copy()
    arena.rewind_to(0)
