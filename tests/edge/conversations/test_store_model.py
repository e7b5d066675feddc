"""Random operations on the store, compared with a simple model in memory."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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

    @rule()
    def create(self) -> None:
        self.conversations[self.store.create().id] = ModelConversation()

    @precondition(lambda self: self.conversations)
    @rule(data=st.data(), pinned=st.booleans())
    def pin(self, data: st.DataObject, pinned: bool) -> None:
        name = data.draw(st.sampled_from(list(self.conversations)))
        if self.conversations[name].deleted:
            with pytest.raises(ConversationError):
                self.store.change(name, pinned=pinned)
        else:
            assert self.store.change(name, pinned=pinned).pinned == pinned
            self.conversations[name].pinned = pinned

    @precondition(lambda self: self.conversations)
    @rule(data=st.data(), deleted=st.booleans())
    def delete_or_restore(self, data: st.DataObject, deleted: bool) -> None:
        name = data.draw(st.sampled_from(list(self.conversations)))
        (self.store.delete if deleted else self.store.restore)(name)
        self.conversations[name].deleted = deleted

    @precondition(lambda self: self.conversations)
    @rule(data=st.data(), content=TEXTS, role=st.sampled_from(["user", "assistant"]))
    def add(self, data: st.DataObject, content: str, role: str) -> None:
        conversation = data.draw(st.sampled_from(list(self.conversations)))
        parent = data.draw(st.none() | st.sampled_from([*self.messages] or [None]))
        allowed = (
            not self.conversations[conversation].deleted
            and (parent is None or (self.messages[parent].conversation == conversation and self.is_live(parent)))
            and (role == "user" or (parent is not None and self.messages[parent].role == "user"))
        )
        if not allowed:
            with pytest.raises(ConversationError):
                self.store.add_message(conversation, parent, role, content)
            return
        message = self.store.add_message(conversation, parent, role, content).id
        self.messages[message] = ModelMessage(conversation, parent, role, content)
        self.conversations[conversation].order.append(message)
        self.conversations[conversation].leaf = message

    @precondition(lambda self: self.messages)
    @rule(data=st.data(), content=TEXTS)
    def rewrite(self, data: st.DataObject, content: str) -> None:
        message = data.draw(st.sampled_from(list(self.messages)))
        if self.is_live(message):
            self.store.rewrite(message, content)
            self.messages[message].content = content
        else:
            with pytest.raises(ConversationError):
                self.store.rewrite(message, content)

    @precondition(lambda self: self.messages)
    @rule(data=st.data(), content=TEXTS)
    def continue_answer(self, data: st.DataObject, content: str) -> None:
        message = data.draw(st.sampled_from(list(self.messages)))
        if self.is_live(message) and self.messages[message].role == "assistant":
            self.store.write_answer(message, content, [{"id": 1}])
            self.store.finish_answer(message, content, MessageState.STOPPED)
            self.messages[message].content = content
        else:
            with pytest.raises(ConversationError):
                self.store.write_answer(message, content)

    @precondition(lambda self: self.messages)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        message = data.draw(st.sampled_from(list(self.messages)))
        conversation = self.messages[message].conversation
        if self.is_live(message):
            leaf = self.newest_leaf(conversation, message)
            assert self.store.select_leaf(conversation, message).leaf == leaf
            self.conversations[conversation].leaf = leaf
        else:
            with pytest.raises(ConversationError):
                self.store.select_leaf(conversation, message)

    @precondition(lambda self: self.messages)
    @rule(data=st.data())
    def delete_message(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.messages)))
        message = self.messages[name]
        conversation = self.conversations[message.conversation]
        if conversation.deleted and message.deleted_with is None:
            with pytest.raises(ConversationError):
                self.store.delete_message(name)
            return
        self.store.delete_message(name)
        if message.deleted_with is not None:
            return
        for other, fields in self.messages.items():
            if fields.deleted_with is None and name in self.path_to(other):
                fields.deleted_with = name
        if name in self.path_to(conversation.leaf):
            conversation.leaf = self.newest_leaf(message.conversation, message.parent)

    @precondition(lambda self: self.messages)
    @rule(data=st.data())
    def restore_message(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.messages)))
        message = self.messages[name]
        group = message.deleted_with
        parent = None if group is None else self.messages[group].parent
        if group is None:
            self.store.restore_message(name)
            return
        if self.conversations[message.conversation].deleted or (parent is not None and not self.is_live(parent)):
            with pytest.raises(ConversationError):
                self.store.restore_message(name)
            return
        self.store.restore_message(name)
        for fields in self.messages.values():
            if fields.deleted_with == group:
                fields.deleted_with = None
        self.conversations[message.conversation].leaf = self.newest_leaf(message.conversation, name)

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


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=8, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.nightly
class TestStoreLong(StoreMachine.TestCase):
    """The same for longer."""

    settings = settings(
        max_examples=300, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
    )
