"""Calibration text of a bundle: sampled from its model (see `text_sampler`) or read from a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...errors import InputError
from ...models.user_text import json_lines, read_text
from ..engine import Engine
from ..engine_loading import load
from ..text.chat_template import Message
from ..text.messages import joined_content
from ..text.turn_markers import TokenArray
from .text_sampler import SAMPLED_TOGETHER, SelfTextSampler

_CHARACTERS: Final = 1 << 16
"""About how many characters of a file are tokenized at a time."""


def sample_texts(
    bundle: Path,
    min_tokens: int,
    max_text_tokens: int,
    seed: int,
    progress: Callable[[float], None] = lambda _: None,
) -> list[TokenArray]:
    """Sample texts from a model at temperature 1, in its chat template if it has one.

    Args:
        bundle: the model's folder.
        min_tokens: tokens to sample in total, template and prompts included.
        max_text_tokens: most tokens of one text.
        seed: the same seed gives the same texts.
        progress: receives the share that is sampled, 0 to 1.

    Returns:
        Token ids, int64 [n] each. They are fewer than `min_tokens` in total if the model only samples empty texts.

    Raises:
        BundleError: the bundle is damaged.
        TemplateError: its chat template fails.
    """
    with load(bundle, device="cpu", cache=False, draft=None, learned=False, parallel=SAMPLED_TOGETHER) as engine:
        return SelfTextSampler(engine.model, max_text_tokens, seed).texts(min_tokens, progress)


def read_texts(bundle: Path, file: Path, min_tokens: int, max_text_tokens: int, seed: int = 0) -> list[TokenArray]:
    """Read a text file as token ids of a model.

    In a .jsonl file the `messages` of each line are rendered in the model's chat template, in a random order;
    lines are read until they have `min_tokens` tokens in total. Any other file is plain text and is read whole.

    Args:
        bundle: the model's folder.
        file: the text.
        min_tokens: tokens to read of a .jsonl file, or all there are.
        max_text_tokens: most tokens of one text; longer ones are cut into pieces.
        seed: the same seed gives the same order of the conversations.

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
        found = (
            _conversations(engine, content, file, seed) if conversations else _pieces(engine, content, max_text_tokens)
        )
        texts: list[TokenArray] = []
        for ids in found:
            starts = range(0, len(ids), max_text_tokens)
            texts += [np.array(ids[start : start + max_text_tokens], np.int64) for start in starts]
            if conversations and sum(map(len, texts)) >= min_tokens:
                break
    texts = [text for text in texts if len(text) > 1]
    if not texts:
        raise InputError(f"{file} holds no text", "give a file with text")
    return texts


def _conversations(engine: Engine, content: str, file: Path, seed: int) -> Iterator[list[int]]:
    """Yield the conversations of JSON lines: in the chat template, or one message under the other without one.

    The order is random, so that the first conversations come from all over the file.
    """
    rows = list(json_lines(content, file))
    for index in np.random.default_rng(seed).permutation(len(rows)).tolist():
        messages = _messages(rows[index], file, index + 1)
        if engine.template is None:
            text = "\n".join(message["content"] for message in messages)
            yield engine.tokenizer.encode(text, add_special_tokens=True)
        else:
            unanswered = messages[-1]["role"] == "user"
            yield engine.encode_chat(messages, add_generation_prompt=unanswered)


def _messages(row: dict[str, Any], file: Path, number: int) -> list[Message]:
    """The messages of a row, each with a text."""
    with suppress(KeyError, TypeError, InputError):
        messages: list[Message] = [
            {**each, "content": joined_content(each["content"], "content")} for each in row["messages"]
        ]
        if messages and all(isinstance(each[name], str) for each in messages for name in ("role", "content")):
            return messages
    raise InputError(f"{file}, row {number}: no messages", "give lines with messages, each with role and content")


def _pieces(engine: Engine, content: str, max_text_tokens: int) -> Iterator[list[int]]:
    """Yield plain text in pieces of `max_text_tokens`, each after the tokens that the tokenizer puts first."""
    first = engine.tokenizer.encode("", add_special_tokens=True)
    room = max(1, max_text_tokens - len(first))
    left: list[int] = []
    begin = 0
    while begin < len(content):  # in parts that end at line ends where possible
        end = content.find("\n", begin + _CHARACTERS) + 1 or len(content)
        left += engine.tokenizer.encode(content[begin:end], add_special_tokens=False)
        begin = end
        whole = len(left) // room * room
        yield from ([*first, *left[start : start + room]] for start in range(0, whole, room))
        left = left[whole:]
    if left:
        yield [*first, *left]
