"""Answers in conversations: the messages that a model reads, and the statistics that are kept."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from ...errors import ContextError
from ...models.progress import Progress
from ...runtime.decode import FinishReason
from ...runtime.engine import Engine
from ...runtime.options import GenerateOptions
from ...runtime.overflow import Overflow, answer_reserve, most_turns, turns_of
from ...runtime.prefill import INT8_GRAPH
from ...runtime.result import Stats
from ...runtime.scheduling.request_run import Cancellation
from ...runtime.text.messages import ChatPrompt
from ..documents.retrieval import CHARACTERS_PER_TOKEN, attached_file, find_passages
from .records import (
    Attachment,
    CallRound,
    MessageState,
    Passage,
    Role,
    StoredMessage,
    message_text,
    split_reasoning,
    with_images,
)
from .store import ConversationStore

END_STATES: Final = {
    FinishReason.STOP: MessageState.COMPLETE,
    FinishReason.LENGTH: MessageState.LENGTH,
    FinishReason.CANCELLED: MessageState.STOPPED,
}
"""States of answers by the reason for which they ended."""
_KEPT: Final = ("first_token_s", "total_s", "prompt_tokens", "reused_tokens", "tokens_per_pass", "drafted", "accepted")
"""Statistics that are kept as they are."""
_SMALL_TALK: Final = re.compile(
    r"(hi+|hello|hey|yo|thanks?|thank you|good (morning|evening|night|day)|bye|ok(ay)?|please|help|test(ing)?|"
    r"(how|who|what) are you|what can you do|what is this|tell me .*|why .*|write .* (poem|story|essay).*)"
    r"( there| you| edge-run| all)?[\s.!?]*",
    re.IGNORECASE,
)


def stats_object(stats: Stats, trimmed: Sequence[str] = (), *, no_passage: bool = False) -> dict[str, Any]:
    """Statistics of an answer as they are kept with it. Times are in seconds.

    Args:
        stats: the statistics.
        trimmed: ids of the messages that were left out of its prompt.
        no_passage: whether nothing was found in the documents.
    """
    return {
        "tokens": stats.text_tokens,
        "tokens_per_second": stats.decode_tokens_per_second,
        **{name: getattr(stats, name) for name in _KEPT},
        "int8_prompt_tokens": stats.prompt_readers.get(INT8_GRAPH, 0),
        "drafters": {name: asdict(counts) for name, counts in stats.by_source.items()},
        "trimmed": list(trimmed),
        **({"no_passage": True} if no_passage else {}),
    }


def is_small_talk(text: str) -> bool:
    """Whether a message asks for nothing that a model for shell commands can do."""
    return _SMALL_TALK.fullmatch(text.strip()) is not None


@dataclass(frozen=True)
class ContextFit:
    """Messages that fit the context of a model."""

    prompt: ChatPrompt
    """The prompt that the messages make, for `Engine.answer`; the oldest ones may have been left out."""
    tokens: int
    """Tokens of the prompt."""
    context: int
    """Tokens of the model's context."""
    reserve: int
    """Tokens that stay free for the answer."""
    trimmed: tuple[str, ...]
    """Ids of the messages that were left out."""
    passages: tuple[Passage, ...] = ()
    """What the answers are given to read of documents."""
    no_passage: bool = False
    """Whether nothing was found in the documents."""


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

    start = engine.answer_start(options)
    start_tokens = 0 if start is None else len(start.token_ids)
    prompts: dict[int, ChatPrompt] = {}

    def tokens_of(kept: int) -> int:
        last = [message for turn in turns[len(turns) - kept :] for message in turn]
        prompts[kept] = _chat_prompt(engine, system, last, options)
        return len(prompts[kept].ids) + start_tokens

    if overflow is Overflow.TRIM:
        kept, tokens = most_turns(len(turns), tokens_of, context, reserve)
    else:
        kept, tokens = len(turns), tokens_of(len(turns))
        if overflow is Overflow.ERROR and tokens >= context:
            raise ContextError(
                f"the conversation has {tokens} tokens and the model's context is {context}",
                "start another, or use the overflow trim or window",
            )
    left_out = tuple(message.id for turn in turns[: len(turns) - kept] for message in turn)
    return ContextFit(prompts[kept], tokens, context, max(min(reserve, context - tokens), 0), left_out)


def fit_answers(
    engine: Engine,
    store: ConversationStore,
    answers: Sequence[StoredMessage],
    options: GenerateOptions,
    progress: Progress,
    cancellation: Cancellation,
    embedding_model: str | None,
    rounds: Sequence[CallRound],
) -> ContextFit:
    """The messages that answers are written to, with passages of documents and the calls that the answers have made.

    Passages that an answer has stay; others are found in the documents of the conversation and in the files that
    `without_long_files` takes out, and kept with it.

    Raises:
        EdgeError: as for `find_passages` and `fit_context`; or the file of conversations cannot be written.
    """
    first = store.message(answers[0].id)
    conversation = store.conversation(first.conversation)
    branch, files = without_long_files(engine, conversation.system, store.branch(first.parent or ""), options)
    *before, question = branch
    passages = first.passages
    paths: dict[str | Path, None] = dict.fromkeys(conversation.documents)
    paths |= dict.fromkeys(attached_file(each.name, each.text) for each in files)
    if paths and not passages:
        all_tokens, own_tokens = (
            len(_chat_prompt(engine, conversation.system, messages, options).ids) for messages in (branch, [question])
        )
        overflow = options.overflow or engine.overflow or Overflow.TRIM
        passages = find_passages(
            engine,
            list(paths),
            question.content,
            options.changed({"system": conversation.system or None, "overflow": overflow}),
            progress,
            lambda: cancellation.cancelled,
            asked=message_text(question),
            earlier=all_tokens - own_tokens,
            embedding_model=embedding_model,
        )
    for each in answers if passages != first.passages else ():
        store.set_passages(each.id, passages)
    messages = [*before, replace(question, passages=passages)]
    if rounds:
        messages.append(replace(first, content="", rounds=tuple(rounds)))
    fit = fit_context(engine, conversation.system, messages, options)
    return replace(fit, passages=passages, no_passage=bool(paths) and not passages)


def without_long_files(
    engine: Engine, system: str, messages: Sequence[StoredMessage], options: GenerateOptions
) -> tuple[list[StoredMessage], list[Attachment]]:
    """Take the text files out of messages that do not fit the context with them, not even alone.

    Raises:
        TemplateError: the model has no chat template, or it failed.
    """
    most = CHARACTERS_PER_TOKEN * engine.context

    def is_long(message: StoredMessage) -> bool:
        is_over = len(message_text(message)) > most
        return is_over or len(_chat_prompt(engine, system, [message], options).ids) >= engine.context

    texts = {each.id: [file for file in each.attachments if file.image is None] for each in messages}
    long = [each.id for each in messages if texts[each.id] and is_long(each)]
    kept = [
        replace(each, attachments=tuple(file for file in each.attachments if file.image is not None))
        if each.id in long
        else each
        for each in messages
    ]
    return kept, [file for message in long for file in texts[message]]


def _chat_prompt(
    engine: Engine, system: str, messages: Sequence[StoredMessage], options: GenerateOptions
) -> ChatPrompt:
    """The prompt of messages; `options` have no system message."""
    return engine.chat_prompt(model_messages(system, messages, calls=takes_calls(engine)), options)


def takes_calls(engine: Engine) -> bool:
    """Whether a model's chat template has a form for calls of tools."""
    return engine.answer_format.tool_format is not None


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

    def add(role: Role, text: str | list[dict[str, Any]], reasoning: str = "") -> None:
        if role is Role.ASSISTANT and not text:
            return
        if objects and objects[-1]["role"] == role and "tool_calls" not in objects[-1]:
            objects[-1]["content"] = _joined(objects[-1]["content"], text)
            return
        objects.append({"role": role.value, "content": text})
        if reasoning:
            objects[-1]["reasoning_content"] = reasoning

    for message in messages:
        for each in message.rounds:
            if calls:
                objects += each.messages()
            else:
                add(message.role, split_reasoning(each.text)[1])
        text = message_text(message)
        reasoning, text = split_reasoning(text) if message.role is Role.ASSISTANT else ("", text)
        add(message.role, with_images(message, text), reasoning)
    return objects


def _joined(before: str | list[dict[str, Any]], after: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Two contents of messages as one."""
    if isinstance(before, str) and isinstance(after, str):
        return f"{before}\n\n{after}"
    texts = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in (before, "\n\n", after)]
    return [part for parts in texts for part in parts]
