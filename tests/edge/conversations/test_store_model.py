"""Random operations on the store, compared with a simple model in memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule, run_state_machine_as_test

from edgerun.edge.conversations.records import MessageState
from edgerun.edge.conversations.store import ConversationStore
from edgerun.errors import ConversationError

TEXTS = st.text("ab \n#é😀", max_size=8)


@dataclass
class ModelMessage:
    """A message of the model."""

    conversation: str
    parent: str | None
    role: str
    content: str
    deleted_with: str | None = None


@dataclass
class ModelConversation:
    """A conversation of the model."""

    pinned: bool = False
    deleted: bool = False
    leaf: str | None = None
    order: list[str] = field(default_factory=list)


class StoreMachine(RuleBasedStateMachine):
    """Does the same to a store and to dictionaries."""

    conversation_ids = Bundle("conversations")
    message_ids = Bundle("messages")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.store = ConversationStore(self.folder / "c.sqlite3", pytest.fail)
        self.conversations: dict[str, ModelConversation] = {}
        self.messages: dict[str, ModelMessage] = {}

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    def children(self, conversation: str, parent: str | None) -> list[str]:
        return [
            name
            for name in self.conversations[conversation].order
            if self.messages[name].parent == parent and self.messages[name].deleted_with is None
        ]

    def newest_leaf(self, conversation: str, message: str | None) -> str | None:
        while children := self.children(conversation, message):
            message = children[-1]
        return message

    def is_live(self, message: str) -> bool:
        found = self.messages[message]
        return found.deleted_with is None and not self.conversations[found.conversation].deleted

    def path_to(self, message: str | None) -> list[str]:
        path: list[str] = []
        while message is not None:
            path.insert(0, message)
            message = self.messages[message].parent
        return path

    def allowed(self, allowed: bool, attempt: Callable[[], Any]) -> bool:
        """Make an attempt, which is refused where it is not allowed; returns whether it is."""
        if allowed:
            attempt()
        else:
            with pytest.raises(ConversationError):
                attempt()
        return allowed

    @rule(target=conversation_ids)
    def create(self) -> str:
        name = self.store.create().id
        self.conversations[name] = ModelConversation()
        return name

    @rule(name=conversation_ids, pinned=st.booleans())
    def pin(self, name: str, pinned: bool) -> None:
        conversation = self.conversations[name]
        if self.allowed(not conversation.deleted, lambda: self.store.change(name, pinned=pinned)):
            conversation.pinned = pinned

    @rule(name=conversation_ids, deleted=st.booleans())
    def delete_or_restore(self, name: str, deleted: bool) -> None:
        (self.store.delete if deleted else self.store.restore)(name)
        self.conversations[name].deleted = deleted

    @rule(
        target=message_ids,
        conversation=conversation_ids,
        parent=st.none() | message_ids,
        content=TEXTS,
        role=st.sampled_from(["user", "assistant"]),
    )
    def add(self, conversation: str, parent: str | None, content: str, role: str) -> Any:
        added: list[str] = []
        allowed = (
            not self.conversations[conversation].deleted
            and (parent is None or (self.messages[parent].conversation == conversation and self.is_live(parent)))
            and (role == "user" or (parent is not None and self.messages[parent].role == "user"))
        )
        self.allowed(allowed, lambda: added.append(self.store.add_message(conversation, parent, role, content).id))
        for message in added:
            self.messages[message] = ModelMessage(conversation, parent, role, content)
            self.conversations[conversation].order.append(message)
            self.conversations[conversation].leaf = message
        return multiple(*added)

    @rule(message=message_ids, content=TEXTS)
    def rewrite(self, message: str, content: str) -> None:
        if self.allowed(self.is_live(message), lambda: self.store.rewrite(message, content)):
            self.messages[message].content = content

    @rule(message=message_ids, content=TEXTS)
    def continue_answer(self, message: str, content: str) -> None:
        is_answer = self.is_live(message) and self.messages[message].role == "assistant"
        if self.allowed(is_answer, lambda: self.store.write_answer(message, content, [{"id": 1}])):
            self.store.finish_answer(message, content, MessageState.STOPPED)
            self.messages[message].content = content

    @rule(message=message_ids)
    def select(self, message: str) -> None:
        conversation = self.messages[message].conversation
        if self.allowed(self.is_live(message), lambda: self.store.select_leaf(conversation, message)):
            self.conversations[conversation].leaf = self.newest_leaf(conversation, message)

    @rule(name=message_ids)
    def delete_message(self, name: str) -> None:
        message = self.messages[name]
        conversation = self.conversations[message.conversation]
        is_deleted = message.deleted_with is not None
        if (
            not self.allowed(is_deleted or not conversation.deleted, lambda: self.store.delete_message(name))
            or is_deleted
        ):
            return
        for other, fields in self.messages.items():
            if fields.deleted_with is None and name in self.path_to(other):
                fields.deleted_with = name
        if name in self.path_to(conversation.leaf):
            conversation.leaf = self.newest_leaf(message.conversation, message.parent)

    @rule(name=message_ids)
    def restore_message(self, name: str) -> None:
        message = self.messages[name]
        group, conversation = message.deleted_with, self.conversations[message.conversation]
        parent = None if group is None else self.messages[group].parent
        allowed = group is None or (not conversation.deleted and (parent is None or self.is_live(parent)))
        if not self.allowed(allowed, lambda: self.store.restore_message(name)) or group is None:
            return
        for fields in self.messages.values():
            if fields.deleted_with == group:
                fields.deleted_with = None
        conversation.leaf = self.newest_leaf(message.conversation, name)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = ConversationStore(self.folder / "c.sqlite3", pytest.fail)

    @rule(text=st.sampled_from(["ab", "aba", "é", "a b", "😀😀😀"]))
    def search(self, text: str) -> None:
        expected = {
            name
            for name, message in self.messages.items()
            if self.is_live(name) and all(word in message.content for word in text.split())
        }
        assert {hit.message for hit in self.store.search(text, limit=1000) if hit.message is not None} == expected

    @invariant()
    def same(self) -> None:
        live, deleted = self.store.conversations(), self.store.conversations(deleted=True)
        assert {each.id for each in live} == {name for name, each in self.conversations.items() if not each.deleted}
        assert {each.id for each in deleted} == {name for name, each in self.conversations.items() if each.deleted}
        assert [each.pinned for each in live] == sorted((each.pinned for each in live), reverse=True)
        for conversation in [*live, *deleted]:
            expected = self.conversations[conversation.id]
            assert (conversation.pinned, conversation.leaf) == (expected.pinned, expected.leaf)
            messages = self.store.messages(conversation.id)
            assert [each.id for each in messages] == [
                name for name in expected.order if self.messages[name].deleted_with is None
            ]
            for message in messages:
                fields = self.messages[message.id]
                assert (message.parent, message.role, message.content) == (fields.parent, fields.role, fields.content)
            if conversation.leaf is not None and not expected.deleted:
                assert [each.id for each in self.store.branch(conversation.leaf)] == self.path_to(expected.leaf)


@pytest.mark.parametrize(("examples", "steps"), [(8, 30), pytest.param(300, 60, marks=pytest.mark.nightly)])
def test_the_store_does_what_the_model_does(examples: int, steps: int) -> None:
    options = {"deadline": None, "suppress_health_check": list(HealthCheck)}
    run_state_machine_as_test(
        StoreMachine, settings=settings(max_examples=examples, stateful_step_count=steps, **options)
    )
