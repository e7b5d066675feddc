"""What happens where a conversation is longer than the context: an error, fewer turns, or a window of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Final, TypeVar

from ..errors import ContextError, InputError
from ..models.bundle import Bundle
from .kv.arena import shared_tokens
from .text.chat_template import Message
from .text.messages import ChatPrompt, images_in

_Item = TypeVar("_Item")

SINKS: Final = 4
"""Number of first tokens that a window keeps: attention goes to them whatever they are (StreamingLLM, Xiao et al.
2023)."""
_RESERVE: Final = 1024
"""Tokens kept free for an answer without a largest number of tokens."""
_RESERVE_SHARE: Final = 4
"""At most this part of the context is kept free for the answer: one in so many."""
_WINDOW_STEPS: Final = 4
"""A window moves on by this part of the context at a time, one in so many, and not token by token: slots are moved
rarely, and several prompts of a growing conversation leave out the same tokens, so that their slots are found again."""


class Overflow(StrEnum):
    """What happens where a conversation is longer than the context."""

    ERROR = "error"
    """A prompt that is too long is an error; an answer ends where the context does."""
    TRIM = "trim"
    """The oldest turns are left out, whole ones only; the system message and the last turn stay."""
    WINDOW = "window"
    """The first tokens, the system message and the newest tokens stay."""


def overflow_of(wanted: str | None, default: str | None, chat: ChatPrompt | None, *, exact: bool) -> Overflow:
    """What to do for an answer: what its options say, else the model's default where that is possible.

    A window would cut images, so whole turns are left out of a conversation that has any.

    Args:
        wanted: what the options say.
        default: what the model was loaded with.
        chat: the messages of the prompt; None for a raw one.
        exact: whether the answer is exact.

    Raises:
        InputError: what the options say is not possible.
    """
    raw = chat is None
    overflow = Overflow(wanted if wanted is not None else default or Overflow.ERROR)
    if overflow is Overflow.WINDOW and chat is not None and images_in(chat.messages):
        return Overflow.TRIM
    if not (raw if overflow is Overflow.TRIM else exact and overflow is Overflow.WINDOW):
        return overflow
    if wanted is None:
        return Overflow.ERROR
    if overflow is Overflow.TRIM:
        raise InputError("a raw prompt has no turns to trim", "use the overflow window or error")
    what = "exact answers have no window, whose keys are rotated and not computed again"
    raise InputError(what, "use trim or error")


def answer_reserve(context: int, max_tokens: int | None) -> int:
    """Number of tokens of the context to keep free for an answer."""
    return min(_RESERVE if max_tokens is None else max_tokens, context // _RESERVE_SHARE)


def expected_tokens(context: int, prompt_tokens: int, max_tokens: int | None) -> int:
    """Number of tokens that a prompt and its answer are expected to fill of the context."""
    return min(context, prompt_tokens + (_RESERVE if max_tokens is None else max_tokens))


def turns_of(messages: Sequence[_Item], role: Callable[[_Item], object]) -> list[list[_Item]]:
    """The messages by turns: a message of the user with the answers to it; answers before the first are a turn."""
    turns: list[list[_Item]] = []
    for message in messages:
        if role(message) == "user" or not turns:
            turns.append([])
        turns[-1].append(message)
    return turns


def most_turns(count: int, tokens_of: Callable[[int], int], context: int, reserve: int) -> tuple[int, int]:
    """The largest number of last turns that fit a context.

    Few turns are tokenized that do not fit, however long the conversation is.

    Args:
        count: number of turns.
        tokens_of: number of tokens of a prompt of so many last turns.
        context: tokens of the context.
        reserve: tokens to keep free for the answer, where more than one turn is left.

    Returns:
        The number of turns, at least 1, and the tokens of their prompt.

    Raises:
        ContextError: not even the last turn fits.
    """
    # Twice as many turns each time until they do not fit, then the number between by bisection.
    kept, tokens = 1, tokens_of(1)
    if tokens >= context:
        raise ContextError(
            f"the last message does not fit the context: {tokens} of {context} tokens",
            "shorten it or its attachments, or load the model with a longer context",
        )
    reserve = min(reserve, context - tokens)
    too_many = count + 1
    while too_many - kept > 1:
        attempt = min(2 * kept, count) if too_many > count else (kept + too_many) // 2
        if (found := tokens_of(attempt)) + reserve <= context:
            kept, tokens = attempt, found
        else:
            too_many = attempt
    return kept, tokens


def trimmed(
    chat: ChatPrompt, answer_tokens: int, context: int, max_tokens: int | None
) -> tuple[ChatPrompt, list[int], int]:
    """Leave out the oldest turns of a conversation until its prompt and some room for the answer fit the context.

    Args:
        chat: the conversation.
        answer_tokens: number of tokens of the answer that follow the prompt already.
        context: tokens of the context.
        max_tokens: largest number of further tokens of the answer.

    Returns:
        The conversation that is left, its prompt, and the number of turns that were left out.

    Raises:
        ContextError: not even the last turn fits.
        TemplateError: the chat template refuses the messages that are left.
    """
    system = chat.system()
    turns = turns_of(chat.messages[len(system) :], lambda message: message.get("role"))
    prompts: dict[int, list[int]] = {}

    def left(kept: int) -> list[Message]:
        return [*system, *(message for turn in turns[len(turns) - kept :] for message in turn)]

    def tokens_of(kept: int) -> int:
        prompts[kept] = chat.encode(left(kept))
        return len(prompts[kept]) + answer_tokens

    kept, _ = most_turns(max(len(turns), 1), tokens_of, context, answer_reserve(context, max_tokens))
    return replace(chat, messages=left(kept)), prompts[kept], max(len(turns), 1) - kept


def kept_first(chat: ChatPrompt | None, prompt_ids: Sequence[int], context: int) -> int:
    """Number of first tokens of a prompt that a window keeps: its sinks, and the system message with the tools.

    Raises:
        ContextError: they take more than half of the context.
        TemplateError: the chat template refuses the system message alone.
    """
    first = SINKS if chat is None else max(SINKS, shared_tokens(chat.beginning(), prompt_ids))
    if first > context // 2:
        raise ContextError(
            f"the system message has {first} tokens and the context {context}, of which a window takes half",
            "shorten it, or load the model with a longer context",
        )
    return first


def window(tokens: int, first: int, context: int) -> int:
    """First of the newest tokens that a window keeps of a sequence, so that at least one more token fits after them.

    Args:
        tokens: number of tokens of the sequence.
        first: number of tokens at its beginning that stay.
        context: tokens of the context.

    Returns:
        The index of that token; `first` where all tokens stay.
    """
    step = max((context - first) // _WINDOW_STEPS, 1)
    steps = max(-(-(tokens + 1 - context) // step), 0)
    return first + min(steps * step, tokens - first - 1)


def fitted(
    chat: ChatPrompt | None,
    prompt_ids: Sequence[int],
    overflow: Overflow,
    context: int,
    start_tokens: int = 0,
    max_tokens: int | None = None,
) -> tuple[ChatPrompt | None, Sequence[int]]:
    """The conversation and the prompt that fit the context, or the same where that is left to the caller.

    Args:
        chat: the messages of the prompt; None for a raw one.
        prompt_ids: the prompt.
        overflow: what to do.
        context: tokens of the context.
        start_tokens: number of tokens that the answer begins with.
        max_tokens: largest number of further tokens of the answer.

    Raises:
        ContextError: they cannot be made to fit.
        TemplateError: the chat template refuses the messages that are left.
    """
    tokens = len(prompt_ids) + start_tokens
    if overflow is Overflow.TRIM:
        if chat is not None and tokens + answer_reserve(context, max_tokens) > context:
            chat, prompt_ids, _ = trimmed(chat, start_tokens, context, max_tokens)
    elif overflow is Overflow.WINDOW and tokens >= context:
        first = kept_first(chat, prompt_ids, context)
        newest = window(tokens, first, context)
        if newest >= len(prompt_ids):
            raise ContextError(
                f"the answer begins with {start_tokens} tokens, and the context has {context}", "let it begin with less"
            )
        prompt_ids = [*prompt_ids[:first], *prompt_ids[newest:]]
    return chat, prompt_ids


def context_limit(bundle: Bundle, capacity: int | None, wanted: int | None) -> int:
    """The context to use: `wanted`, at most what the model allows and a cache of fixed size holds.

    Raises:
        InputError: `wanted` is more than that, or nothing says what the model allows.
    """
    limits = [limit for limit in (bundle.context, capacity) if limit is not None]
    limits += () if wanted is None else (wanted,)
    if not limits:
        raise InputError(f"nothing beside {bundle.graph} says how long the context is", "give it with --context")
    if wanted is not None and wanted > (allowed := min(limits)):
        raise InputError(
            f"context is {wanted}",
            f"this model allows at most {allowed}, unless it is exported with a longer --context",
        )
    return min(limits)
