"""Export and import of conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import edgerun
from edgerun.edge.conversations.answering import stats_object
from edgerun.edge.conversations.records import Attachment, Conversation, MessageState, Role, StoredMessage
from edgerun.edge.conversations.store import ConversationStore
from edgerun.edge.conversations.transfer import as_markdown, read_markdown
from edgerun.errors import ConversationError
from support.nightly import examples


def shape(store: ConversationStore, conversation: Conversation) -> tuple[Any, ...]:
    """Everything about a conversation but its ids, which are replaced by the numbers of messages."""
    messages = store.messages(conversation.id)
    numbers = {message.id: number for number, message in enumerate(messages)}
    fields = msgspec.to_builtins(conversation)
    fields |= {"id": None, "leaf": numbers.get(conversation.leaf or "")}
    objects = []
    for message in messages:
        own = {"id": None, "conversation": None, "parent": numbers.get(message.parent or "")}
        objects.append(msgspec.to_builtins(message) | own)
    return fields, objects


def test_what_answers_are_stored_with_can_be_imported(store: ConversationStore, tiny_bundle: Path) -> None:
    with edgerun.load(tiny_bundle, cache=False, draft=None) as engine:
        reply = engine.generate("a b a b a b a b", max_tokens=20, ignore_eos=True)
    conversation = store.create(title="answered")
    first = store.add_message(conversation.id, None, "user", "q")
    answer = store.add_message(conversation.id, first.id, "assistant", "", state=MessageState.WRITING)
    stats = {**stats_object(reply.stats, [first.id, "deleted"]), "small_talk": True, "tools_ignored": True}
    store.finish_answer(answer.id, reply.text, MessageState.COMPLETE, tokens=[{"id": 1}], stats=stats)
    store.add_message(conversation.id, first.id, "assistant", "so f", state=MessageState.WRITING)
    text = store.export_json([conversation.id]).replace('"so f"', '"so f", "tokens": [1]')
    (copy,) = store.import_json(text)  # with tokens, which earlier versions could write
    question, copied, written = store.messages(copy.id)
    assert not copied.has_tokens
    assert copied.stats == {**stats, "trimmed": [question.id]}
    assert written.state is MessageState.INTERRUPTED


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(turns=st.lists(st.tuples(st.integers(0, 20), TEXTS, st.sampled_from([*MessageState])), max_size=12), title=TEXTS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_json_brings_back_every_tree(
    store: ConversationStore, turns: list[tuple[int, str, MessageState]], title: str
) -> None:
    sampling = {"temperature": 0.5, "stop": ["x"]}
    conversation = store.create(title=title, system=title, folder="work", pinned=len(turns) > 6, sampling=sampling)
    messages: list[StoredMessage | None] = [None]
    for number, content, state in turns:
        parent = messages[number % len(messages)]
        if parent is None or parent.role is Role.ASSISTANT:
            files = [Attachment(content.strip()[:5], content)] * (number % 3)
            added = store.add_message(conversation.id, parent and parent.id, "user", content, attachments=files)
        else:
            added = store.add_message(conversation.id, parent.id, "assistant", "", state=MessageState.WRITING)
            ended = MessageState.COMPLETE if state is MessageState.WRITING else state
            store.finish_answer(added.id, content, ended, error=content or None)
        messages.append(added)
        if number % 7 == 0:
            store.select_leaf(conversation.id, messages[1].id)
    if title and messages[-1] is not None:
        store.delete_message(messages[-1].id)
    (copy,) = store.import_json(store.export_json([conversation.id]))
    assert copy.id != conversation.id
    assert shape(store, copy) == shape(store, store.conversation(conversation.id))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("format", "other", "the file does not fit: Invalid enum value 'other' - at `$.format`"),
        ("version", 2, "the file does not fit: Invalid enum value 2 - at `$.version`"),
        ("extra", 1, "the file does not fit: Object contains unknown field `extra`"),
        ("conversations.0.title", 5, "the file does not fit: Expected `str`, got `int`"),
        ("conversations.0.title", "x" * 201, "the file does not fit: Expected `str` of length <= 200"),
        ("conversations.0.created", -1, "the file does not fit: Expected `float` >= 0.0"),
        ("conversations.0.sampling", {"logit_bias": {}}, "sampling has no 'logit_bias'"),
        ("conversations.0.sampling", {"top_p": 7}, "sampling: top-p is 7"),
        ("conversations.0.leaf", "none", "conversations[0]: leaf is 'none'; it must be the id of one of its messages"),
        ("conversations.0.messages.0.role", "system", "the file does not fit: Invalid enum value 'system'"),
        ("conversations.0.messages.1.state", "done", "the file does not fit: Invalid enum value 'done'"),
        ("conversations.0.messages.0.parent", "later", "conversations[0].messages[0]: no message before it has the id"),
        ("conversations.0.messages.1.id", "a", "conversations[0].messages[1]: two messages have the id 'a'"),
        ("conversations.0.messages.1.stats", {"tokens": "<b>"}, "the file does not fit: Expected `int`, got `str`"),
        (
            "conversations.0.messages.1.stats",
            {"other": 1},
            "the file does not fit: Object contains unknown field `other`",
        ),
        ("conversations.0.messages.0.attachments", [{"name": "x", "text": ""}] * 33, "the message has 33 attachments"),
    ],
)
def test_an_import_is_checked_and_leaves_nothing_behind(
    store: ConversationStore, path: str, value: object, said: str
) -> None:
    messages = [
        {"id": "a", "role": "user", "content": "q", "created": 1.0},
        {"id": "b", "role": "assistant", "content": "r", "created": 2.0, "parent": "a"},
    ]
    good: dict[str, Any] = {"title": "good", "created": 1, "updated": 2, "messages": messages}
    file: dict[str, Any] = {"format": "edge-run conversations", "version": 1, "conversations": [good]}
    assert [each.title for each in store.import_json(json.dumps(file))] == ["good"]
    file["conversations"].append(json.loads(json.dumps(good)))
    file["conversations"].reverse()
    *parents, last = path.split(".")
    target: Any = file
    for name in parents:
        target = target[int(name) if name.isdecimal() else name]
    target[last] = value
    with pytest.raises(ConversationError) as caught:
        store.import_json(json.dumps(file))
    assert str(caught.value).startswith(said)
    assert len(store.conversations()) == 1


def test_other_texts_are_refused_in_one_line(store: ConversationStore) -> None:
    for text in ("", "{", "[" * 100_000, '{"format": NaN}', "\ud800", "[]"):
        with pytest.raises(ConversationError, match="^the file .*; import a file that edge-run exported$"):
            store.import_json(text)
    for text, said in (
        ("just text", "x.md has no message of a user; messages follow the headings '## User' and '## Assistant'"),
        ("## Assistant\nhi", "x.md has no message of a user"),
        ("## Assistant\nhi\n## User\nho", "an answer needs the message that it answers"),
    ):
        with pytest.raises(ConversationError) as caught:
            store.import_markdown(text, "x.md")
        assert str(caught.value).startswith(said)
    assert store.conversations() == []


def test_markdown_shows_the_branch_in_view(store: ConversationStore) -> None:
    tree = store.create(title="A tree", system="Be brief.")
    question = store.add_message(tree.id, None, "user", "q", attachments=[Attachment("a.txt", "text\n")])
    first = store.add_message(tree.id, question.id, "assistant", "one", model="m")
    store.add_message(tree.id, first.id, "user", "more")
    store.add_message(tree.id, question.id, "assistant", "two")
    store.select_leaf(tree.id, first.id)
    assert store.export_markdown(tree.id) == (
        "# A tree\n\n## System\n\nBe brief.\n\n## User\n\na.txt\n```\ntext\n```\n\nq\n\n"
        "## Assistant (m)\n\none\n\n## User\n\nmore\n"
    )
    copy = store.import_markdown(store.export_markdown(tree.id), "tree.md")
    assert (copy.title, copy.system) == ("A tree", "Be brief.")
    assert store.export_markdown(copy.id) == store.export_markdown(tree.id)


def test_markdown_hides_where_a_model_lies_and_may_be_of_other_editors(
    store: ConversationStore, tmp_path: Path
) -> None:
    conversation = store.create()
    asked = store.add_message(conversation.id, None, Role.USER, "hello")
    store.add_message(conversation.id, asked.id, Role.ASSISTANT, "hi", model=str(tmp_path / "my-model"))
    assert "## Assistant (my-model)\n" in store.export_markdown(conversation.id)
    # Files of other editors are read too.
    copy = store.import_markdown("\ufeffnotes\r\n## user\r\nhello\r\n\r\n## ASSISTANT\r\nhi\r\n", "chat of today.md")
    assert copy.title == "chat of today"
    assert [message.content for message in store.messages(copy.id)] == ["hello", "hi"]


LINES = st.lists(
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
    | st.sampled_from(["## User", "\\## assistant", "\\\\## System (x)", "# Title", "", "```", "## Useful"])
).map("\n".join)


@given(st.lists(LINES, min_size=1, max_size=4), LINES)
@settings(max_examples=examples(40))
def test_markdown_keeps_every_line_of_messages(contents: list[str], system: str) -> None:
    roles = [Role.USER, Role.ASSISTANT] * len(contents)
    branch = [
        StoredMessage(str(number), "c", None, role, content)
        for number, (role, content) in enumerate(zip(roles, contents, strict=False))
    ]
    conversation = Conversation("c", "Title", True, None, False, system, {}, None, None, 0.0, 0.0, None)
    read = read_markdown(as_markdown(conversation, branch), "x.md")
    assert [message.content for message in read.messages] == [content.strip("\n") for content in contents]
    assert [message.role for message in read.messages] == [message.role for message in branch]
    assert (read.title, read.system) == ("Title", system.strip("\n"))
