"""Chooses the messages of a conversation that fit a model's context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import ContextError
from ...runtime.engine import Engine
from ...runtime.options import GenerateOptions
from ...runtime.overflow import Overflow, answer_reserve, most_turns, turns_of
from .reasoning_text import split_reasoning
from .records import Role, StoredMessage, message_text


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
    stay. With the overflow `window`, which cuts the prompt, or `error`, all messages stay.

    Args:
        engine: the model.
        system: system message; empty for none.
        messages: a branch, from its first message on; the last message of the user is the one to answer.
        options: options of the answer.

    Raises:
        ContextError: the last message does not fit, even alone, or with the overflow `error` the conversation.
        TemplateError: the model has no chat template, or it failed.
    """
    overflow = Overflow(options.overflow or engine.overflow or Overflow.TRIM)
    options = replace(options, system=None)
    context = engine.context
    reserve = answer_reserve(context, options.max_tokens)
    turns = turns_of(messages, lambda message: message.role)

    def tokens_of(kept: int) -> int:
        last = [message for turn in turns[len(turns) - kept :] for message in turn]
        return engine.count_tokens(model_messages(system, last, calls=takes_calls(engine)), options)

    if overflow is Overflow.TRIM:
        kept, tokens = most_turns(len(turns), tokens_of, context, reserve)
    else:
        kept, tokens = len(turns), tokens_of(len(turns))
        if overflow is Overflow.ERROR and tokens >= context:
            raise ContextError(
                f"the conversation has {tokens} tokens and the model's context is {context}",
                "start another, or use the overflow trim or window",
            )
    reserve = max(min(reserve, context - tokens), 0)
    left_out = tuple(message.id for turn in turns[: len(turns) - kept] for message in turn)
    chosen = tuple(message for turn in turns[len(turns) - kept :] for message in turn)
    return ContextFit(chosen, tokens, context, reserve, left_out)


def takes_calls(engine: Engine) -> bool:
    """Whether a model's chat template has a form for calls of tools."""
    return engine.model.answer_format.tool_format is not None


def model_messages(system: str, messages: Sequence[StoredMessage], *, calls: bool = True) -> list[dict[str, Any]]:
    """Messages in the form of OpenAI's chat API.

    Chat templates take turns of user and assistant, so empty answers are left out, and messages of one role that
    follow each other then are joined by an empty line. Of answers that begin with reasoning, templates choose what the
    model reads again.

    Args:
        system: system message; empty for none.
        messages: a branch, from its first message on.
        calls: whether calls of tools and their results are among them; otherwise only what was written.
    """
    objects: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []

    def add(role: Role, text: str, reasoning: str = "") -> None:
        if role is Role.ASSISTANT and not text:
            return
        if objects and objects[-1]["role"] == role and "tool_calls" not in objects[-1]:
            objects[-1]["content"] += f"\n\n{text}"
        else:
            objects.append(
                {"role": role.value, "content": text, **({"reasoning_content": reasoning} if reasoning else {})}
            )

    for message in messages:
        for each in message.rounds:
            if calls:
                objects += each.messages()
            else:
                add(message.role, split_reasoning(each.text)[1])
        if message.role is Role.ASSISTANT:
            reasoning, text = split_reasoning(message_text(message))
            add(message.role, text, reasoning)
        else:
            add(message.role, message_text(message))
    return objects
