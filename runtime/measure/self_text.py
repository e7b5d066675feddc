"""Calibration text: sampled from the model or read from a file.

A chat model writes both sides of a conversation. After the beginning of a user turn of its template it makes up a
request, because it was trained on many, and then it answers (Magpie, Xu et al. 2024). A model that does not end its
requests answers a few neutral requests instead, and a model without a template continues from its first token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...errors import InputError
from ...models.text_files import json_lines, read_text
from ..engine import Engine, load
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
_CHARACTERS: Final = 1 << 16
"""About how many characters of a file are tokenized at a time."""


def sample_texts(
    bundle: Path,
    min_tokens: int,
    max_text_tokens: int,
    seed: int,
    progress: Callable[[float], None] = lambda _: None,
    *,
    sliding_windows: bool = True,
) -> list[TokenArray]:
    """Sample texts from a model at temperature 1, in its chat template if it has one.

    Args:
        bundle: the model's folder.
        min_tokens: tokens to sample in total, template and prompts included.
        max_text_tokens: most tokens of one text.
        seed: the same seed gives the same texts.
        progress: receives the share that is sampled, 0 to 1.
        sliding_windows: whether the model may have layers that attend to a sliding window; if not, several texts are
            sampled in the same passes.

    Returns:
        Token ids, int64 [n] each. They are fewer than `min_tokens` in total if the model only samples empty texts.

    Raises:
        BundleError: the bundle is damaged.
        TemplateError: its chat template fails.
    """
    with load(bundle, device="cpu", cache=False, draft=None, learned=False) as engine:
        sampler = _SelfTextSampler(engine, min(max_text_tokens, engine.context - 1), seed, sliding_windows)
        texts: list[TokenArray] = []
        empty_texts = 0
        source = sampler.conversations() if engine.template is not None else sampler.monologues()
        for text in source:
            empty_texts = empty_texts + 1 if text is None else 0
            if text is not None:
                texts.append(np.array(text, np.int64))
            sampled = sum(map(len, texts))
            progress(min(1.0, sampled / min_tokens))
            if sampled >= min_tokens or empty_texts == _MAX_EMPTY_TEXTS:
                return texts
    raise AssertionError("the sources of texts are endless")


def read_texts(bundle: Path, file: Path, min_tokens: int, max_text_tokens: int) -> list[TokenArray]:
    """Read a text file as token ids of a model.

    In a .jsonl file the `messages` of each line are rendered in the model's chat template, in a fixed random order;
    lines are read until they have `min_tokens` tokens in total. Any other file is plain text and is read whole.

    Args:
        bundle: the model's folder.
        file: the text.
        min_tokens: tokens to read of a .jsonl file, or all there are.
        max_text_tokens: most tokens of one text; longer ones are cut into pieces.

    Returns:
        Token ids, int64 [n] each.

    Raises:
        BundleError: the bundle is damaged.
        InputError: the file cannot be read, holds no text, or has a line without messages.
        TemplateError: the model's chat template fails.
    """
    content = read_text(file)
    with load(bundle, device="cpu", cache=False, draft=None, learned=False) as engine:
        conversations = file.suffix == ".jsonl"
        found = _conversations(engine, content, file) if conversations else _pieces(engine, content, max_text_tokens)
        texts = []
        total = 0
        for ids in found:
            texts += [
                np.array(ids[start : start + max_text_tokens], np.int64)
                for start in range(0, len(ids), max_text_tokens)
            ]
            total += len(ids)
            if total >= min_tokens and conversations:
                break
    texts = [text for text in texts if len(text) > 1]
    if not texts:
        raise InputError(f"{file} holds no text", "give a file with text")
    return texts


class _SelfTextSampler:
    """Samples texts in batches."""

    def __init__(self, engine: Engine, max_text_tokens: int, seed: int, sliding_windows: bool) -> None:
        self._engine = engine
        self._max_text_tokens = max_text_tokens
        self._batched = BatchedSampler(engine, max_text_tokens, sliding_windows=sliding_windows)
        self._seeds = (seed * 1_000_003 + number & (1 << 63) - 1 for number in count())
        self._end_tokens = engine.tokenizer.eos | engine.tokenizer.special_ids

    def monologues(self) -> Iterator[list[int] | None]:
        """Yield texts that begin with the first token, endlessly; None for a text of less than two sampled tokens."""
        tokenizer = self._engine.tokenizer
        start = tokenizer.encode("", add_special_tokens=True) or sorted(tokenizer.eos)[:1] or [0]
        while True:
            for text in self._sample([start] * self._batched.batch_size, self._max_text_tokens, tokenizer.eos):
                yield text.tokens if len(text.tokens) > len(start) + 1 else None

    def conversations(self) -> Iterator[list[int] | None]:
        """Yield a request and its answer each, endlessly; None where one of the two is empty."""
        frame = _TemplateFrame.of(self._engine)
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
        return bool(self._engine.tokenizer.decode(tokens).strip())

    def _neutral_conversations(self) -> Iterator[list[int] | None]:
        prompts = cycle(
            self._engine.model.encode_chat([{"role": "user", "content": request}]) for request in _NEUTRAL_REQUESTS
        )
        while True:
            yield from self._answered([*islice(prompts, self._batched.batch_size)])

    def _answered(self, prompts: list[list[int]]) -> Iterator[list[int] | None]:
        """Yield each prompt with the model's answer and the end token after it; None for an empty answer."""
        texts = self._sample(prompts, self._max_text_tokens, self._engine.tokenizer.eos)
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
    def of(cls, engine: Engine) -> _TemplateFrame | None:
        """Find the frame of a model's template; None if the template does more than copy the request."""
        rendered = engine.model.require_template().render([{"role": "user", "content": _PLACEHOLDER}])
        before, found, after = rendered.partition(_PLACEHOLDER)
        if not found or not after or not before or _PLACEHOLDER in after:
            return None
        frame = [engine.tokenizer.encode(part, add_special_tokens=False) for part in (before, after)]
        return cls(*frame) if all(frame) else None


def _conversations(engine: Engine, content: str, file: Path) -> Iterator[list[int]]:
    """Yield the conversations of JSON lines: in the chat template, or one message under the other without one.

    The order is random but fixed, so that the first conversations come from all over the file.
    """
    rows = list(json_lines(content, file))
    for index in np.random.default_rng(0).permutation(len(rows)).tolist():
        messages = _messages(rows[index], file, index + 1)
        if engine.template is None:
            text = "\n".join(message["content"] for message in messages)
            yield engine.tokenizer.encode(text, add_special_tokens=True)
        else:
            unanswered = messages[-1]["role"] == "user"
            yield engine.model.encode_chat(messages, add_generation_prompt=unanswered)


def _messages(row: dict[str, Any], file: Path, number: int) -> list[dict[str, Any]]:
    messages = row.get("messages")
    if (
        not isinstance(messages, list)
        or not messages
        or not all(
            isinstance(each, dict) and all(isinstance(each.get(field), str) for field in ("role", "content"))
            for each in messages
        )
    ):
        raise InputError(f"{file}, row {number}: no messages", "give lines with messages, each with role and content")
    return messages


def _pieces(engine: Engine, content: str, max_text_tokens: int) -> Iterator[list[int]]:
    """Yield plain text in pieces of `max_text_tokens`, each after the tokens that the tokenizer puts first."""
    first = engine.tokenizer.encode("", add_special_tokens=True)
    room = max(1, max_text_tokens - len(first))
    left: list[int] = []
    for part in _parts(content):
        left += engine.tokenizer.encode(part, add_special_tokens=False)
        whole = len(left) // room * room
        yield from ([*first, *left[start : start + room]] for start in range(0, whole, room))
        left = left[whole:]
    if left:
        yield [*first, *left]


def _parts(content: str) -> Iterator[str]:
    """Yield the text in parts that end at line ends where possible."""
    start = 0
    while start < len(content):
        end = content.find("\n", start + _CHARACTERS) + 1 or len(content)
        yield content[start:end]
        start = end
