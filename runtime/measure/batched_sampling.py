"""Samples several texts in the same passes.

A pass over a few tokens costs little more than one over a single token. The texts share one KV cache with their slots
interleaved: each token attends to the common prefix and to its own text, as the branches of a token tree do. That takes
a cache slot per token of every text, and a graph whose masks do not count slots, as those of sliding windows do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from ..graph.bound_graph import BoundGraph
from ..graph.graph_io import Floats
from ..loaded_model import LoadedModel
from ..prefill import prefill
from ..sampling.sampler import Sampler, SamplingParams

_MAX_BATCH: Final = 8
"""Most texts of a pass; beyond it a further text costs as much again."""


@dataclass
class SampledText:
    """A text that is being sampled."""

    number: int
    """Index of the text in its batch."""
    tokens: list[int]
    """Token ids so far, those of the prompt included."""
    sampler: Sampler
    pending: list[int] = field(default_factory=list)
    """The last token ids, which no pass has read yet."""
    end: int | None = None
    """The end token that was sampled after the text, if any."""

    def sample(self, logits: Floats, max_tokens: int, end_tokens: frozenset[int]) -> bool:
        """Sample the next token from `logits` float32 [V]; return whether the text goes on after it."""
        if len(self.tokens) >= max_tokens:
            return False
        token = self.sampler.choose(logits, len(self.tokens))
        if token in end_tokens:
            self.end = token
            return False
        self.tokens.append(token)
        self.pending = [token]
        return len(self.tokens) < max_tokens


class BatchedSampler:
    """Samples continuations of prompts, as many in a pass as the context has room for.

    Args:
        model: the model.
        max_text_tokens: most tokens of any text.
        sliding_windows: whether some layers attend to a sliding window; then every text is sampled by itself.
    """

    def __init__(self, model: LoadedModel, max_text_tokens: int, *, sliding_windows: bool) -> None:
        self._bound: BoundGraph = model.new_sequence().bound
        self._cached_prefix: list[int] = []
        batched = model.graph_io.supports_trees and not sliding_windows
        self.batch_size: Final = max(1, min(_MAX_BATCH, model.context // max_text_tokens if batched else 1))
        """How many prompts to continue at a time."""

    def sample(
        self, prompts: Sequence[list[int]], max_tokens: int, end_tokens: frozenset[int], seeds: Iterator[int]
    ) -> list[SampledText]:
        """Continue each prompt at temperature 1 up to an end token, or to `max_tokens` tokens with the prompt.

        Args:
            prompts: at most `batch_size` token id lists, none empty.
            max_tokens: most tokens of a text.
            end_tokens: ids that end a text.
            seeds: gives a seed for each text.
        """
        prefix = _common_prefix(prompts)
        if not prefix:  # a pass over an empty cache cannot hold several texts
            return [text for prompt in prompts for text in self.sample([prompt], max_tokens, end_tokens, seeds)]
        texts = [
            SampledText(
                number, [*prompt], Sampler(SamplingParams(temperature=1.0, seed=seed), self._bound.graph_io.vocab_size)
            )
            for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=False))
        ]
        prefix_logits = self._prefill(prefix)
        active = []
        for text in texts:
            text.pending = text.tokens[len(prefix) :]
            if text.pending or text.sample(prefix_logits, max_tokens, end_tokens):
                active.append(text)
        slot_texts = np.zeros(0, np.int64)
        while active:
            slot_texts = np.concatenate([slot_texts, *(np.full(len(text.pending), text.number) for text in active)])
            logits = self._pass(active, slot_texts)
            active = [
                text for text, own in zip(active, logits, strict=True) if text.sample(own, max_tokens, end_tokens)
            ]
        return texts

    def _prefill(self, prefix: list[int]) -> Floats:
        """Make these token ids the cache's contents and return the logits [V] after the last one."""
        arena = self._bound.arena
        kept = len(_common_prefix([self._cached_prefix, prefix[:-1]]))
        arena.rewind_to(min(kept, arena.length))
        logits = prefill(self._bound, prefix).logits
        self._cached_prefix = prefix
        return np.array(logits)

    def _pass(self, active: Sequence[SampledText], slot_texts: npt.NDArray[np.int64]) -> Floats:
        """Run the pending tokens and return the logits [texts, V] after each text, valid until the next pass.

        `slot_texts` holds the number of the text of every cache slot behind the common prefix, pending ones included.
        """
        tokens = [token for text in active for token in text.pending]
        if self.batch_size == 1:
            logits = self._bound.forward(tokens, logits_for=(len(tokens) - 1,))
            self._bound.arena.commit(len(tokens))
            return logits
        positions = [
            index for text in active for index in range(len(text.tokens) - len(text.pending), len(text.tokens))
        ]
        last = np.cumsum([len(text.pending) for text in active]) - 1
        mask = slot_texts[-len(tokens) :, None] == slot_texts
        mask[:, -len(tokens) :] &= np.tri(len(tokens), dtype=np.bool_)
        logits = self._bound.forward(tokens, logits_for=last, positions=positions, tree_mask=mask)
        self._bound.arena.commit(len(tokens))
        return logits


def _common_prefix(texts: Sequence[list[int]]) -> list[int]:
    length = 0
    for tokens in zip(*texts, strict=False):
        if len(set(tokens)) > 1:
            break
        length += 1
    return texts[0][:length]
