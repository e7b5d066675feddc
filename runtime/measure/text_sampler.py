"""Samples texts from a model, on which something about it is to be measured.

A chat model writes both sides of a conversation. After the beginning of a user turn of its template it makes up a
request, because it was trained on many, and then it answers (Magpie, Xu et al. 2024). A model that does not end its
requests answers a few neutral requests instead, and a model without a template continues from its first token.

A pass over a few tokens costs little more than one over a single token, so several texts are sampled in the same
passes. They share one KV cache with their slots interleaved: each token attends to the common prefix and to its own
text, as the branches of a token tree do. That takes a cache slot per token of every text, and a graph whose masks do
not count slots, as masks of sliding windows do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle, islice
from typing import Final

import numpy as np
import numpy.typing as npt

from ..graph.bound_graph import BoundGraph
from ..graph.graph_io import Floats
from ..kv.prefix_cache import shared_tokens
from ..loaded_model import LoadedModel
from ..options import GenerateOptions
from ..prefill import prefill
from ..sampling.sampler import Sampler, SamplingParams
from ..text.turn_markers import TokenArray

_NEUTRAL_REQUESTS: Final = (
    "Tell me a short story.",
    "Explain how rain forms.",
    "Write a function that reverses a list.",
    "What should I cook with rice and eggs?",
    "Give me three tips for learning a language.",
    "Compare trains and cars.",
    "Write a polite letter that asks for a refund.",
    "What is 17 times 23? Show the steps.",
    "Summarize the history of bread.",
    "Translate into French: the house stands by the river.",
    "List the files of a folder by size in the shell.",
    "Why do people dream?",
)
_PLACEHOLDER: Final = "0c5fd1a7e4"
"""Stands for the request when the template is rendered to find what surrounds a request."""
_TRIAL_REQUESTS: Final = 4
"""Requests that a model begins first; unless half of them end, it answers neutral requests instead."""
_MAX_REQUEST_TOKENS: Final = 128
_MAX_EMPTY_TEXTS: Final = 64
"""Sampling stops after so many empty texts in a row."""
_MAX_BATCH: Final = 8
"""Most texts of a pass; beyond it a further text costs as much again."""


class SelfTextSampler:
    """Samples texts of a model at temperature 1, in its chat template if it has one, in batches.

    Args:
        model: the model.
        max_text_tokens: most tokens of one text, if the context has room for them.
        seed: the same seed gives the same texts.
        sliding_windows: whether the model may have layers that attend to a sliding window; if not, several texts are
            sampled in the same passes.
    """

    def __init__(self, model: LoadedModel, max_text_tokens: int, seed: int, *, sliding_windows: bool) -> None:
        self._model = model
        self._max_text_tokens = min(max_text_tokens, model.context - 1)
        self._batched = BatchedSampler(model, self._max_text_tokens, sliding_windows=sliding_windows)
        self._seeds = (seed * 1_000_003 + number & (1 << 63) - 1 for number in count())
        self._end_tokens = model.tokenizer.eos | model.tokenizer.special_ids

    def texts(self, min_tokens: int, progress: Callable[[float], None] = lambda _: None) -> list[TokenArray]:
        """Sample texts with `min_tokens` tokens in total, template and prompts included.

        Args:
            min_tokens: tokens to sample.
            progress: receives the share that is sampled, 0 to 1.

        Returns:
            Token ids, int64 [n] each. They are fewer in total if the model only samples empty texts.

        Raises:
            TemplateError: the model's chat template fails.
        """
        texts: list[TokenArray] = []
        empty_texts = 0
        for text in self._conversations() if self._model.template is not None else self._monologues():
            empty_texts = empty_texts + 1 if text is None else 0
            if text is not None:
                texts.append(np.array(text, np.int64))
            sampled = sum(map(len, texts))
            progress(min(1.0, sampled / min_tokens))
            if sampled >= min_tokens or empty_texts == _MAX_EMPTY_TEXTS:
                break
        return texts

    def _monologues(self) -> Iterator[list[int] | None]:
        """Yield texts that begin with the first token, endlessly; None for a text of less than two sampled tokens."""
        tokenizer = self._model.tokenizer
        start = tokenizer.encode("", add_special_tokens=True) or sorted(tokenizer.eos)[:1] or [0]
        while True:
            for text in self._sample([start] * self._batched.batch_size, self._max_text_tokens, tokenizer.eos):
                yield text.tokens if len(text.tokens) > len(start) + 1 else None

    def _conversations(self) -> Iterator[list[int] | None]:
        """Yield a request and its answer each, endlessly; None where one of the two is empty."""
        frame = _template_frame(self._model)
        first = [] if frame is None else self._requests(frame, _TRIAL_REQUESTS)
        if frame is None or 2 * len(first) < _TRIAL_REQUESTS:
            options, model = GenerateOptions(), self._model
            asked = ([{"role": "user", "content": request}] for request in _NEUTRAL_REQUESTS)
            prompts = cycle(model.chat_prompt(messages, options).ids for messages in asked)
            while True:
                yield from self._answered([*islice(prompts, self._batched.batch_size)])
        yield from self._answered(first)
        while True:
            requests = self._requests(frame, self._batched.batch_size)
            yield from self._answered(requests)
            if not requests:
                yield None

    def _requests(self, frame: tuple[list[int], list[int]], number: int) -> list[list[int]]:
        """Sample `number` users' requests; return the beginnings of an answer to each request that ends."""
        before, after = frame
        max_tokens = len(before) + min(_MAX_REQUEST_TOKENS, self._max_text_tokens // 2)
        texts = self._sample([before] * number, max_tokens, self._end_tokens | {after[0]})
        decode = self._model.tokenizer.decode
        return [
            [*text.tokens, *after]
            for text in texts
            if text.end is not None and decode(text.tokens[len(before) :]).strip()
        ]

    def _answered(self, prompts: list[list[int]]) -> Iterator[list[int] | None]:
        """Yield each prompt with the model's answer and the end token after it; None for an empty answer."""
        texts = self._sample(prompts, self._max_text_tokens, self._model.tokenizer.eos)
        for prompt, text in zip(prompts, texts, strict=True):
            if len(text.tokens) == len(prompt):
                yield None
            else:
                yield text.tokens if text.end is None else [*text.tokens, text.end]

    def _sample(self, prompts: list[list[int]], max_tokens: int, end_tokens: frozenset[int]) -> Iterator[SampledText]:
        size = self._batched.batch_size
        for start in range(0, len(prompts), size):
            yield from self._batched.sample(prompts[start : start + size], max_tokens, end_tokens, self._seeds)


def _template_frame(model: LoadedModel) -> tuple[list[int], list[int]] | None:
    """Token ids that a chat template writes before and after a user's request; None if it does more than copy it."""
    rendered = model.require_template().render([{"role": "user", "content": _PLACEHOLDER}])
    before, found, after = rendered.partition(_PLACEHOLDER)
    if not found or _PLACEHOLDER in after:
        return None
    frame = [model.tokenizer.encode(part, add_special_tokens=False) for part in (before, after)]
    return (frame[0], frame[1]) if all(frame) else None


@dataclass
class SampledText:
    """A text that is being sampled."""

    number: int
    """Index of the text in its batch."""
    tokens: list[int]
    """Token ids so far, including the prompt."""
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
        prefix = prompts[0][: min(shared_tokens(prompts[0], each) for each in prompts)]
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
        kept = shared_tokens(self._cached_prefix, prefix[:-1])
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
