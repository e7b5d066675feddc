"""Which messages of a conversation fit a model's context."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import edgerun
from edgerun import Engine, GenerateOptions
from edgerun.edge.conversations.answering import ContextFit, fit_context, model_messages
from edgerun.edge.conversations.records import Attachment, Role, StoredMessage
from edgerun.errors import ContextError
from edgerun.runtime.text.messages import ChatPrompt


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path) -> Iterator[Engine]:
    with edgerun.load(tiny_bundle, cache=False, draft=None) as loaded:
        yield loaded


def message(number: int, role: Role, content: str, attachments: tuple[Attachment, ...] = ()) -> StoredMessage:
    return StoredMessage(str(number), "c", None, role, content, attachments)


def turns(count: int, words: int = 4) -> list[StoredMessage]:
    """A branch of so many questions, the last one without an answer."""
    roles = [Role.USER, Role.ASSISTANT] * count
    return [message(number, role, f"{number} " * words) for number, role in enumerate(roles[:-1])]


def prompt_tokens(engine: Engine, system: str, messages: list[StoredMessage]) -> int:
    return len(engine.encode_chat(model_messages(system, messages)))


def smallest_trim(engine: Engine, system: str, messages: list[StoredMessage], reserve: int) -> int:
    """How many messages the first turns have that must go, tried one by one."""
    return next(
        start
        for start in range(0, len(messages), 2)
        if prompt_tokens(engine, system, messages[start:]) + reserve <= engine.context
    )


def test_a_short_conversation_is_whole_and_so_is_a_long_one_with_other_policies(engine: Engine) -> None:
    messages = turns(2)
    fit = fit_context(engine, "Be brief.", messages, GenerateOptions(max_tokens=10))
    tokens = prompt_tokens(engine, "Be brief.", messages)
    assert fit == ContextFit(fit.prompt, tokens, engine.context, reserve=10, trimmed=())
    assert len(fit.prompt.ids) == tokens
    messages = turns(60)
    tokens = prompt_tokens(engine, "Be brief.", messages)
    fit = fit_context(engine, "Be brief.", messages, GenerateOptions(overflow="window"))
    assert (fit.tokens, fit.reserve, fit.trimmed) == (tokens, 0, ())
    with pytest.raises(ContextError, match=f"the conversation has {tokens} tokens and the model's context is"):
        fit_context(engine, "Be brief.", messages, GenerateOptions(overflow="error"))


@pytest.mark.parametrize("count", [8, 9, 15, 30, 31, 60])
def test_the_fewest_whole_turns_are_left_out(engine: Engine, count: int) -> None:
    messages = turns(count)
    fit = fit_context(engine, "Be brief.", messages, GenerateOptions())
    assert fit.reserve == engine.context // 4
    start = smallest_trim(engine, "Be brief.", messages, fit.reserve)
    kept = messages[start:]
    assert fit.trimmed == tuple(each.id for each in messages[:start])
    assert fit.tokens == prompt_tokens(engine, "Be brief.", kept)
    # The prompt is one that the engine takes, with room for the reserve.
    reply = engine.generate(model_messages("Be brief.", kept), max_tokens=fit.reserve, ignore_eos=True)
    assert reply.stats.completion_tokens == fit.reserve
    assert reply.stats.prompt_tokens == fit.tokens


def test_few_turns_of_a_long_conversation_are_tokenized(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    encode = ChatPrompt.encode

    def counted(prompt: ChatPrompt, messages: list[dict[str, str]]) -> list[int]:
        seen.append(len(messages))
        return encode(prompt, messages)

    monkeypatch.setattr(ChatPrompt, "encode", counted)
    fit = fit_context(engine, "", turns(2000), GenerateOptions())
    assert max(seen) <= 4 * (3999 - len(fit.trimmed))
    assert len(seen) < 12


def test_a_last_message_gets_what_room_there_is_or_is_refused_with_the_numbers(engine: Engine) -> None:
    words = 40
    while prompt_tokens(engine, "", [message(9, Role.USER, "word " * words)]) < engine.context - 20:
        words += 1
    messages = [*turns(3)[:-1], message(9, Role.USER, "word " * words)]
    fit = fit_context(engine, "", messages, GenerateOptions())
    assert fit.trimmed == tuple(each.id for each in messages[:-1])
    assert fit.reserve == engine.context - fit.tokens
    long = message(0, Role.USER, "word " * 300)
    tokens = prompt_tokens(engine, "", [long])
    said = f"the last message does not fit the context: {tokens} of {engine.context} tokens; shorten it"
    with pytest.raises(ContextError, match=said):
        fit_context(engine, "", [long], GenerateOptions())


def test_messages_for_the_model_alternate() -> None:
    messages = [
        message(0, Role.USER, "one", (Attachment("a`.md", "```\nx\n```"),)),
        message(1, Role.ASSISTANT, ""),
        message(2, Role.USER, "two"),
        message(3, Role.ASSISTANT, "three"),
    ]
    assert model_messages("s", messages) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a`.md\n````\n```\nx\n```\n````\n\none\n\ntwo"},
        {"role": "assistant", "content": "three"},
    ]
