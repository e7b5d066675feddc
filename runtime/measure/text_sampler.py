"""Samples texts from a model, on which something about it is to be measured.

A chat model writes both sides of a conversation. After the beginning of a user turn of its template it makes up a
request, because it was trained on many, and then it answers (Magpie, Xu et al. 2024). A model that does not end its
requests answers a few neutral requests instead, and a model without a template continues from its first token.

Several texts are sampled together, in passes that they share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle, islice
from typing import Final

import numpy as np
import numpy.typing as npt

from ..decode import DecodeLimits, decode
from ..graph.bound_graph import BoundGraph
from ..loaded_model import LoadedModel
from ..options import GenerateOptions
from ..sampling.sampler import Sampler, SamplingParams
from ..scheduling.request_queue import TurnTaker
from ..scheduling.several_answers import run_together

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
SAMPLED_TOGETHER: Final = 8
"""Most texts of a pass; beyond it a further text costs as much again."""


class SelfTextSampler:
    """Samples texts of a model at temperature 1, in its chat template if it has one, in batches.

    Args:
        model: the model.
        max_text_tokens: most tokens of one text, if the context has room for them.
        seed: the same seed gives the same texts.
    """

    def __init__(self, model: LoadedModel, max_text_tokens: int, seed: int) -> None:
        self._model = model
        self._max_text_tokens = min(max_text_tokens, model.context - 1)
        self._batch_size: Final = model.queue.parallel
        self._seeds = (seed * 1_000_003 + number & (1 << 63) - 1 for number in count())
        self._end_tokens = model.tokenizer.eos | model.tokenizer.special_ids

    def texts(self, min_tokens: int, progress: Callable[[float], None] = lambda _: None) -> list[npt.NDArray[np.int64]]:
        """Sample texts with `min_tokens` tokens in total, template and prompts included.

        Args:
            min_tokens: tokens to sample.
            progress: receives the share that is sampled, 0 to 1.

        Returns:
            Token ids, int64 [n] each. They are fewer in total if the model only samples empty texts.

        Raises:
            TemplateError: the model's chat template fails.
        """
        texts: list[npt.NDArray[np.int64]] = []
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
            for text in self._sample([start] * self._batch_size, self._max_text_tokens, tokenizer.eos):
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
                yield from self._answered([*islice(prompts, self._batch_size)])
        yield from self._answered(first)
        while True:
            requests = self._requests(frame, self._batch_size)
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

    def _sample(self, prompts: list[list[int]], max_tokens: int, end_tokens: frozenset[int]) -> list[SampledText]:
        """Continue each prompt at temperature 1 up to an end token, or to `max_tokens` tokens with the prompt."""
        queue, vocab_size = self._model.queue, self._model.graph_io.vocab_size
        texts = [SampledText([*prompt]) for prompt in prompts]

        def continued(text: SampledText, bound: BoundGraph, seed: int, taker: TurnTaker) -> Generator[int, None, None]:
            bound.shares_passes = True
            sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), vocab_size)
            limits = DecodeLimits(max_tokens - len(text.tokens), cancelled=partial(queue.yield_turn, taker))
            for step in decode(bound, [*text.tokens], sampler, limits):
                if step.tokens[0] in end_tokens:
                    text.end = step.tokens[0]
                    return
                text.tokens.append(step.tokens[0])
                yield step.tokens[0]

        unfinished = [text for text in texts if len(text.tokens) < max_tokens]
        starts = [partial(continued, text, self._model.new_sequence().bound, next(self._seeds)) for text in unfinished]
        takers = [TurnTaker(steady=True) for _ in starts]
        deque(run_together(queue, starts, takers, queue.parallel), 0)
        return texts


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

    tokens: list[int]
    """Token ids so far, including the prompt."""
    end: int | None = None
    """The end token that was sampled after the text, if any."""
