"""Samples texts from a model, on which something about it is to be measured.

A chat model writes both sides of a conversation. After the beginning of a user turn of its template it makes up a
request, because it was trained on many, and then it answers (Magpie, Xu et al. 2024). A model that does not end its
requests answers a few neutral requests instead, and a model without a template continues from its first token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, cycle, islice
from typing import Final

import numpy as np

from ..loaded_model import LoadedModel
from ..options import GenerateOptions
from ..text.turn_markers import TokenArray
from .batched_sampling import BatchedSampler, SampledText

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
        frame = _TemplateFrame.of(self._model)
        first = [] if frame is None else self._requests(frame, _TRIAL_REQUESTS)
        if frame is None or 2 * len(first) < _TRIAL_REQUESTS:
            yield from self._neutral_conversations()
            return
        yield from self._answered([[*request, *frame.after] for request in first])
        while True:
            requests = self._requests(frame, self._batched.batch_size)
            yield from self._answered([[*request, *frame.after] for request in requests])
            if not requests:
                yield None

    def _requests(self, frame: _TemplateFrame, number: int) -> list[list[int]]:
        """Sample `number` conversations up to the end of the user's request; return those whose request ends."""
        max_tokens = len(frame.before) + min(_MAX_REQUEST_TOKENS, self._max_text_tokens // 2)
        texts = self._sample([frame.before] * number, max_tokens, self._end_tokens | {frame.after[0]})
        return [
            text.tokens for text in texts if text.end is not None and self._has_text(text.tokens[len(frame.before) :])
        ]

    def _has_text(self, tokens: list[int]) -> bool:
        return bool(self._model.tokenizer.decode(tokens).strip())

    def _neutral_conversations(self) -> Iterator[list[int] | None]:
        options = GenerateOptions()
        prompts = cycle(
            self._model.chat_prompt([{"role": "user", "content": request}], options).ids
            for request in _NEUTRAL_REQUESTS
        )
        while True:
            yield from self._answered([*islice(prompts, self._batched.batch_size)])

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


@dataclass(frozen=True)
class _TemplateFrame:
    """Token ids that a chat template writes around a user's request."""

    before: list[int]
    after: list[int]

    @classmethod
    def of(cls, model: LoadedModel) -> _TemplateFrame | None:
        """Find the frame of a model's template; None if the template does more than copy the request."""
        rendered = model.require_template().render([{"role": "user", "content": _PLACEHOLDER}])
        before, found, after = rendered.partition(_PLACEHOLDER)
        if not found or not after or not before or _PLACEHOLDER in after:
            return None
        frame = [model.tokenizer.encode(part, add_special_tokens=False) for part in (before, after)]
        return cls(*frame) if all(frame) else None
