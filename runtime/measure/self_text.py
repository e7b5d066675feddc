"""Text to calibrate a model with: in its own words, or from a file as it would read it.

A chat model writes both sides of a conversation. Given the beginning of a user's turn as its template has it, it makes
up a request, since it was trained on many; then it answers (Magpie, Xu et al. 2024). A model that cannot end a request
is asked a few neutral things instead, and one without a template goes on from its first token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...edge.bench.prompt_sets import json_lines, read_text
from ...errors import InputError
from ...export.workbench import TokenArray
from ..engine import Engine, load
from .batched_sampling import Continued, SideBySide

_NEUTRAL: Final = (
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
_PLACE: Final = "0c5fd1a7e4"
"""Stands for a request where a template is looked at."""
_TRIALS: Final = 4
"""Requests that a model may begin before it is judged: half of them must have come to an end."""
_LONGEST_REQUEST: Final = 128
_FRUITLESS: Final = 64
"""Texts of nothing in a row that show that a model says nothing."""
_CHARACTERS: Final = 1 << 16
"""About how many of a file are made tokens at a time."""


def write_texts(
    bundle: Path, tokens: int, longest: int, seed: int, done: Callable[[float], None] = lambda _: None
) -> list[TokenArray]:
    """Texts that the model of a bundle samples at temperature 1; see `Writer`.

    They may have fewer tokens in all where the model has nothing to say.

    Raises:
        BundleError: the bundle is damaged.
        TemplateError: its chat template fails.
    """
    with load(bundle, device="cpu", cache=False, draft=None, learned=False) as engine:
        pen = _Pen(engine, min(longest, engine.context - 1), seed)
        texts: list[TokenArray] = []
        fruitless = 0
        drafts = pen.conversations() if engine.template is not None else pen.monologues()
        for text in drafts:
            fruitless = fruitless + 1 if text is None else 0
            if text is not None:
                texts.append(np.array(text, np.int64))
            written = sum(map(len, texts))
            done(min(1.0, written / tokens))
            if written >= tokens or fruitless == _FRUITLESS:
                return texts
    raise AssertionError("a model's words do not end")


def read_texts(bundle: Path, file: Path, tokens: int, longest: int) -> list[TokenArray]:
    """Texts of a file, as tokens of the model of a bundle; see `Reader`.

    Raises:
        BundleError: the bundle is damaged.
        InputError: the file cannot be read, holds no text, or has a line without messages.
        TemplateError: the model's chat template fails.
    """
    content = read_text(file)
    with load(bundle, device="cpu", cache=False, draft=None, learned=False) as engine:
        found = _conversations(engine, content, file) if file.suffix == ".jsonl" else _pieces(engine, content, longest)
        texts = []
        total = 0
        for ids in found:
            texts += [np.array(ids[start : start + longest], np.int64) for start in range(0, len(ids), longest)]
            total += len(ids)
            if total >= tokens and file.suffix == ".jsonl":
                break
    texts = [text for text in texts if len(text) > 1]
    if not texts:
        raise InputError(f"{file} holds no text", "give a file with text")
    return texts


class _Pen:
    """Samples texts, some at a time."""

    def __init__(self, engine: Engine, longest: int, seed: int) -> None:
        self._engine = engine
        self._longest = longest
        self._side_by_side = SideBySide(engine, longest)
        self._seeds = (seed * 1_000_003 + number & (1 << 63) - 1 for number in count())
        self._ends = engine.tokenizer.eos | engine.tokenizer.special_ids

    def monologues(self) -> Iterator[list[int] | None]:
        """Texts from the first token on, without end; None for one of less than two tokens."""
        tokenizer = self._engine.tokenizer
        start = tokenizer.encode("", add_special_tokens=True) or sorted(tokenizer.eos)[:1] or [0]
        while True:
            for text in self._continued([start] * self._side_by_side.together, self._longest, tokenizer.eos):
                yield text.tokens if len(text.tokens) > len(start) + 1 else None

    def conversations(self) -> Iterator[list[int] | None]:
        """A request and its answer each, without end; None where one of them is empty."""
        frame = _Frame.of(self._engine)
        first = [] if frame is None else self._requests(frame, _TRIALS)
        if frame is None or 2 * len(first) < _TRIALS:
            yield from self._answers()
            return
        yield from self._answered([[*request, *frame.after] for request in first])
        while True:
            requests = self._requests(frame, self._side_by_side.together)
            yield from self._answered([[*request, *frame.after] for request in requests])
            if not requests:
                yield None

    def _requests(self, frame: _Frame, number: int) -> list[list[int]]:
        """Beginnings of conversations up to the end of a request that the model made up, of so many those that end."""
        most = len(frame.before) + min(_LONGEST_REQUEST, self._longest // 2)
        texts = self._continued([frame.before] * number, most, self._ends | {frame.after[0]})
        return [text.tokens for text in texts if text.end is not None and self._says(text.tokens[len(frame.before) :])]

    def _says(self, tokens: list[int]) -> bool:
        return bool(self._engine.tokenizer.decode(tokens).strip())

    def _answers(self) -> Iterator[list[int] | None]:
        asked = cycle(self._engine.model.encode_chat([{"role": "user", "content": request}]) for request in _NEUTRAL)
        while True:
            yield from self._answered([*islice(asked, self._side_by_side.together)])

    def _answered(self, prompts: list[list[int]]) -> Iterator[list[int] | None]:
        """Conversations with the answers that the model gives, and the token that ends each; None without an answer."""
        for prompt, text in zip(
            prompts, self._continued(prompts, self._longest, self._engine.tokenizer.eos), strict=True
        ):
            if len(text.tokens) == len(prompt):
                yield None
            else:
                yield text.tokens if text.end is None else [*text.tokens, text.end]

    def _continued(self, prompts: list[list[int]], most: int, ends: frozenset[int]) -> Iterator[Continued]:
        """Texts that begin with the prompts; see `SideBySide.continued`."""
        together = self._side_by_side.together
        for start in range(0, len(prompts), together):
            yield from self._side_by_side.continued(prompts[start : start + together], most, ends, self._seeds)


@dataclass(frozen=True)
class _Frame:
    """What a template writes around a request, as tokens."""

    before: list[int]
    after: list[int]

    @classmethod
    def of(cls, engine: Engine) -> _Frame | None:
        """The frame of a model's template; None where it does more with a request than to write it down."""
        written = engine.model.require_template().render([{"role": "user", "content": _PLACE}])
        before, found, after = written.partition(_PLACE)
        if not found or not after or not before or _PLACE in after:
            return None
        frame = [engine.tokenizer.encode(part, add_special_tokens=False) for part in (before, after)]
        return cls(*frame) if all(frame) else None


def _conversations(engine: Engine, content: str, file: Path) -> Iterator[list[int]]:
    """Conversations of JSON lines with `messages`: in the chat template, or one message under the other.

    They come in an order drawn once and for all, so that the first of them are from all over the file.
    """
    rows = list(json_lines(content, file))
    for place in np.random.default_rng(0).permutation(len(rows)).tolist():
        messages = _messages(rows[place], file, place + 1)
        if engine.template is None:
            text = "\n".join(message["content"] for message in messages)
            yield engine.tokenizer.encode(text, add_special_tokens=True)
        else:
            asked = messages[-1]["role"] == "user"
            yield engine.model.encode_chat(messages, add_generation_prompt=asked)


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


def _pieces(engine: Engine, content: str, longest: int) -> Iterator[list[int]]:
    """Plain text in pieces of `longest` tokens, each after what the tokenizer puts first."""
    first = engine.tokenizer.encode("", add_special_tokens=True)
    room = max(1, longest - len(first))
    left: list[int] = []
    for part in _parts(content):
        left += engine.tokenizer.encode(part, add_special_tokens=False)
        whole = len(left) // room * room
        yield from ([*first, *left[start : start + room]] for start in range(0, whole, room))
        left = left[whole:]
    if left:
        yield [*first, *left]


def _parts(content: str) -> Iterator[str]:
    """Text cut at ends of lines where there are some."""
    start = 0
    while start < len(content):
        end = content.find("\n", start + _CHARACTERS) + 1 or len(content)
        yield content[start:end]
        start = end
