"""Chooses the messages of a conversation that fit a model's context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ...errors import ContextError
from ...runtime.engine import Engine
from ...runtime.options import GenerateOptions
from .records import Role, StoredMessage, message_text

_RESERVE: Final = 1024
"""Tokens kept free for an answer without a largest number of tokens."""
_RESERVE_SHARE: Final = 4
"""At most this part of the context is kept free for the answer: one in so many."""


@dataclass(frozen=True)
class ContextFit:
    """Messages that fit the context of a model."""

    messages: tuple[StoredMessage, ...]
    """The messages for the model; the oldest ones may have been left out."""
    tokens: int
    """Tokens of the prompt."""
    context: int
    """Tokens of the model's context."""
    reserve: int
    """Tokens that stay free for the answer."""
    trimmed: tuple[str, ...]
    """Ids of the messages that were left out."""


def fit_context(engine: Engine, system: str, messages: Sequence[StoredMessage], options: GenerateOptions) -> ContextFit:
    """Leave out the oldest turns of a branch until the prompt and some room for the answer fit the context.

    A turn is a message of the user with the answers to it. The system message and the last message of the user always
    stay. Few turns are tokenized that do not fit, however long the conversation is.

    Args:
        engine: the model.
        system: system message; empty for none.
        messages: a branch, from its first message on; the last message of the user is the one to answer.
        options: options of the answer.

    Raises:
        ContextError: the last message does not fit, even alone.
        TemplateError: the model has no chat template, or it failed.
    """
    options = replace(options, system=None)
    context = engine.context
    reserve = min(_RESERVE if options.max_tokens is None else options.max_tokens, context // _RESERVE_SHARE)
    turns = _turns(messages)

    def tokens_of(kept: int) -> int:
        last = [message for turn in turns[len(turns) - kept :] for message in turn]
        return engine.count_tokens(model_messages(system, last), options)

    # Twice as many turns each time until they do not fit, then the number between by bisection.
    kept, tokens = 1, tokens_of(1)
    if tokens >= context:
        raise ContextError(
            f"the last message does not fit the context: {tokens} of {context} tokens",
            "shorten it or its attachments, or load the model with a longer context",
        )
    reserve = min(reserve, context - tokens)
    too_many = len(turns) + 1
    while too_many - kept > 1:
        attempt = min(2 * kept, len(turns)) if too_many > len(turns) else (kept + too_many) // 2
        if (count := tokens_of(attempt)) + reserve <= context:
            kept, tokens = attempt, count
        else:
            too_many = attempt
    left_out = tuple(message.id for turn in turns[: len(turns) - kept] for message in turn)
    chosen = tuple(message for turn in turns[len(turns) - kept :] for message in turn)
    return ContextFit(chosen, tokens, context, reserve, left_out)


def model_messages(system: str, messages: Sequence[StoredMessage]) -> list[dict[str, Any]]:
    """Messages in the form of OpenAI's chat API.

    Chat templates take turns of user and assistant, so empty answers are left out, and messages of one role that
    follow each other then are joined by an empty line.
    """
    objects: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for message in messages:
        text = message_text(message)
        if message.role is Role.ASSISTANT and not text:
            continue
        if objects and objects[-1]["role"] == message.role:
            objects[-1]["content"] += f"\n\n{text}"
        else:
            objects.append({"role": message.role.value, "content": text})
    return objects


def _turns(messages: Sequence[StoredMessage]) -> list[list[StoredMessage]]:
    """The messages by turns; answers before the first message of the user are a turn of their own."""
    turns: list[list[StoredMessage]] = []
    for message in messages:
        if message.role is Role.USER or not turns:
            turns.append([])
        turns[-1].append(message)
    return turns
