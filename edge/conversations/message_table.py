"""The trees of messages in the store, and the processes that write messages."""

from __future__ import annotations

import json
import re
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Final

import msgspec
import psutil

from ...errors import ConversationError, UnknownIdError
from .conversation_table import ConversationTable, as_json, checked_line, parsed, reads, writes
from .database import ConversationDatabase
from .records import (
    MAX_ATTACHMENTS,
    MAX_IMAGES,
    MAX_TEXT,
    MAX_TITLE,
    Attachment,
    CallRound,
    ChangeKind,
    Conversation,
    MessageState,
    Passage,
    Role,
    StoredMessage,
    new_id,
    records_of,
    require_length,
    title_of,
    valid_text,
)

_COLUMNS: Final = ", ".join(each.name for each in fields(StoredMessage)).replace(
    "has_tokens", "EXISTS (SELECT 1 FROM token_part WHERE token_part.message = message.id)"
)
_BRANCH: Final = f"""
    WITH RECURSIVE branch (ancestor, depth) AS (
        SELECT ?, 0
        UNION ALL
        SELECT parent, depth + 1 FROM message JOIN branch ON id = ancestor WHERE parent IS NOT NULL
    )
    SELECT {_COLUMNS} FROM message JOIN branch ON id = ancestor ORDER BY depth DESC
"""  # noqa: S608
_DELETE: Final = """
    WITH RECURSIVE below (id) AS (
        SELECT ?
        UNION ALL
        SELECT message.id FROM message JOIN below ON message.parent = below.id WHERE message.deleted IS NULL
    )
    UPDATE message SET deleted = ?, deleted_with = ? WHERE id IN below
"""
_IMAGE: Final = re.compile(r"data:image/(?:png|jpeg);base64,[A-Za-z0-9+/]*={0,2}")
NO_QUESTION: Final = "an answer needs the message that it answers"
_TOLERANCE_S: Final = 0.5
"""Largest difference of two times at which one process started."""


class MessageTable(ConversationTable):
    """Messages of conversations.

    Args:
        database: the open database.
    """

    def __init__(self, database: ConversationDatabase) -> None:
        super().__init__(database)
        process = psutil.Process()
        self.writer: Final = f"{process.pid} {_started(process):.3f} {secrets.token_hex(4)}"
        """This store as a writer of answers: process id, the time at which the process started, a random name."""

    @reads
    def message(self, message_id: str) -> StoredMessage:
        """The message with an id, also a deleted one."""
        row = self.sql(f"SELECT {_COLUMNS} FROM message WHERE id = ?", message_id).fetchone()  # noqa: S608
        if row is None:
            raise UnknownIdError("message", message_id, "it may have been deleted")
        return _message(row)

    def live_message(self, message_id: str) -> StoredMessage:
        """The message with an id.

        Raises:
            ConversationError: there is none; or it or its conversation is deleted.
        """
        message = self.message(message_id)
        if self._deletion(message_id)[0] is not None or self.conversation(message.conversation).deleted is not None:
            raise ConversationError(f"the message {message_id!r} is deleted", "restore it first")
        return message

    @reads
    def messages(self, conversation_id: str) -> list[StoredMessage]:
        """All messages of a conversation, in the order in which they were added; their parents make them a tree."""
        self.conversation(conversation_id)
        rows = self.sql(
            f"SELECT {_COLUMNS} FROM message WHERE conversation = ? AND deleted IS NULL ORDER BY number",  # noqa: S608
            conversation_id,
        )
        return [_message(row) for row in rows]

    @reads
    def branch(self, leaf_id: str | None) -> list[StoredMessage]:
        """The messages from the first one to a given one; none for None."""
        if leaf_id is None:
            return []
        self.live_message(leaf_id)
        return [_message(row) for row in self.sql(_BRANCH, leaf_id)]

    @reads
    def shown(self, conversation_id: str) -> tuple[Conversation, list[StoredMessage]]:
        """A conversation and the branch that is shown, of one moment: between two reads its leaf may be deleted."""
        conversation = self.conversation(conversation_id)
        return conversation, self.branch(conversation.leaf)

    @writes
    def add_message(
        self,
        conversation_id: str,
        parent_id: str | None,
        role: str,
        content: str,
        *,
        attachments: Sequence[Attachment] = (),
        model: str | None = None,
        state: MessageState = MessageState.COMPLETE,
        rounds: Sequence[CallRound] = (),
    ) -> StoredMessage:
        """Add a message, which becomes the leaf; the first one of the user titles an untitled conversation.

        Args:
            conversation_id: its conversation.
            parent_id: the message before it, of the same conversation; None for a first message.
            role: `user` or `assistant`; an answer follows a message of the user.
            content: its text.
            attachments: text files and images that belong to it.
            model: the model that writes it.
            state: `writing` for an answer that this store will write with `write_answer` and `finish_answer`.
            rounds: calls of tools that an answer begins with.
        """
        conversation = self.live_conversation(conversation_id)
        parent = None if parent_id is None else self.live_message(parent_id)
        if parent is not None and parent.conversation != conversation_id:
            raise ConversationError(f"the message {parent_id!r} is of another conversation")
        if role == Role.ASSISTANT and (parent is None or parent.role is not Role.USER):
            raise ConversationError(NO_QUESTION, "give the user's message as its parent")
        values: dict[str, Any] = {
            "id": new_id(),
            "conversation": conversation_id,
            "parent": parent_id,
            "role": Role(role).value,
            "content": checked_content(content),
            "attachments": encoded_attachments(attachments),
            "created": time.time(),
            "model": None if model is None else checked_line(model, "model"),
            "state": state.value,
            "rounds": encoded_rounds(rounds),
            "writer": self.writer if state is MessageState.WRITING else None,
        }
        self.insert_row("message", values)
        if role == Role.USER and not conversation.title:
            title = title_of(content) or next((each.name for each in attachments), "")
            self.sql("UPDATE conversation SET title = ? WHERE id = ?", valid_text(title), conversation_id)
        self.show(conversation_id, values["id"])
        self.touch(conversation_id)
        self.note(ChangeKind.MESSAGE, conversation_id, values["id"])
        self.note(ChangeKind.CONVERSATION, conversation_id)
        return self.message(values["id"])

    @writes
    def rewrite(self, message_id: str, content: str) -> StoredMessage:
        """Replace the text of a message; what follows it stays, and the tokens of an answer are removed."""
        message = self.live_message(message_id)
        if message.state is MessageState.WRITING:
            raise ConversationError("this answer is being written", "stop it first")
        self.sql("UPDATE message SET content = ? WHERE id = ?", checked_content(content), message_id)
        self.sql("DELETE FROM token_part WHERE message = ?", message_id)
        self.touch(message.conversation)
        self.note(ChangeKind.MESSAGE, message.conversation, message_id)
        return self.message(message_id)

    @writes
    def set_passages(self, message_id: str, passages: Sequence[Passage]) -> None:
        """Keep the parts of documents that an answer is given to read."""
        message = self.live_message(message_id)
        self.sql("UPDATE message SET passages = ? WHERE id = ?", encoded_records(passages), message_id)
        self.note(ChangeKind.MESSAGE, message.conversation, message_id)

    @writes
    def select_leaf(self, conversation_id: str, message_id: str) -> Conversation:
        """Show the branch of a message, down to the newest leaf below it."""
        if self.live_message(message_id).conversation != conversation_id:
            raise ConversationError(f"the message {message_id!r} is of another conversation")
        self.show(conversation_id, self.newest_leaf(conversation_id, message_id))
        self.note(ChangeKind.CONVERSATION, conversation_id)
        return self.conversation(conversation_id)

    @writes
    def delete_message(self, message_id: str) -> None:
        """Delete a message with all that follows it; `restore_message` undoes it for 30 days."""
        message = self.message(message_id)
        if self._deletion(message_id)[0] is None:
            leaf = self.live_conversation(message.conversation).leaf
            shown = any(each.id == message_id for each in self.branch(leaf))
            self.sql(_DELETE, message_id, time.time(), message_id)
            if shown:
                # The newest message beside the deleted one, or the message before it if there is none.
                self.show(message.conversation, self.newest_leaf(message.conversation, message.parent))
        self.note(ChangeKind.MESSAGE_DELETED, message.conversation, message_id)
        self.note(ChangeKind.CONVERSATION, message.conversation)

    @writes
    def restore_message(self, message_id: str) -> StoredMessage:
        """Undo the deletion of a message; what was deleted with it is there again, and its branch is shown."""
        message = self.message(message_id)
        if (group := self._deletion(message_id)[1]) is not None:
            self.live_conversation(message.conversation)
            if (parent := self.message(group).parent) is not None:
                self.live_message(parent)
            self.sql("UPDATE message SET deleted = NULL, deleted_with = NULL WHERE deleted_with = ?", group)
            self.show(message.conversation, self.newest_leaf(message.conversation, message_id))
        self.note(ChangeKind.MESSAGE, message.conversation, message_id)
        self.note(ChangeKind.CONVERSATION, message.conversation)
        return message

    def show(self, conversation_id: str, leaf: str | None) -> None:
        """Make a message the last one of the branch that is shown."""
        self.sql("UPDATE conversation SET leaf = ? WHERE id = ?", leaf, conversation_id)

    def touch(self, conversation_id: str) -> None:
        """Note that a message of the conversation was written now."""
        self.sql("UPDATE conversation SET updated = ? WHERE id = ?", time.time(), conversation_id)

    def newest_leaf(self, conversation_id: str, message_id: str | None) -> str | None:
        """The message that is reached by following the newest message from each one on; None is before the first."""
        # The plus sign keeps SQLite from using the index of conversations, with which it would read all messages.
        below = "parent IS ? AND +conversation = ? AND deleted IS NULL"
        newest = f"SELECT id FROM message WHERE {below} ORDER BY number DESC LIMIT 1"  # noqa: S608
        while row := self.sql(newest, message_id, conversation_id).fetchone():
            message_id = row[0]
        return message_id

    def _deletion(self, message_id: str) -> tuple[float | None, str | None]:
        """When a message was deleted, and the message that it was deleted with; None if it was not."""
        found: tuple[float | None, str | None]
        found = self.sql("SELECT deleted, deleted_with FROM message WHERE id = ?", message_id).fetchone()
        return found


def is_running(writer: str) -> bool:
    """Whether the process of a writer still runs: process ids are used again, so its start is compared, too."""
    try:
        pid, started, _ = writer.split(" ")
        process = psutil.Process(int(pid))
        return abs(_started(process) - float(started)) < _TOLERANCE_S and process.status() != psutil.STATUS_ZOMBIE
    except psutil.AccessDenied:
        return True
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return False


def _started(process: psutil.Process) -> float:
    """When a process started, in seconds, by a clock that nobody sets.

    Linux counts from the start of the system, and `create_time` adds the time of that start, which changes with the
    clock. Elsewhere the time of the start is recorded once.
    """
    started: float = process.create_time()
    return started - psutil.boot_time() if sys.platform == "linux" else started


def _message(row: Sequence[Any]) -> StoredMessage:
    """The message of a row of `_COLUMNS`."""
    stored = StoredMessage(*row)
    return replace(
        stored,
        role=Role(stored.role),
        attachments=tuple(Attachment(*each) for each in parsed(row[5], [])),
        state=MessageState(stored.state),
        stats=parsed(row[10], None),
        has_tokens=bool(stored.has_tokens),
        rounds=records_of(CallRound, parsed(row[-2], ())),
        passages=records_of(Passage, parsed(row[-1], ())),
    )


def checked_content(content: str) -> str:
    """The text of a message as it is stored.

    Raises:
        ConversationError: it is too long.
    """
    require_length(len(content), MAX_TEXT, "the message")
    return valid_text(content)


def encoded_rounds(rounds: Sequence[CallRound]) -> str | None:
    """Rounds of calls as they are stored; errors as for `encoded_records`."""
    return encoded_records(rounds, "the calls of tools and their results")


def encoded_records(records: Sequence[CallRound] | Sequence[Passage], what: str = "the passages") -> str | None:
    """Rounds of calls, or passages, as they are stored.

    Raises:
        ConversationError: they are too long.
    """
    if not records:
        return None
    text = as_json(msgspec.to_builtins(records), what)
    require_length(len(text), MAX_TEXT, what, have="have")
    return text


def encoded_attachments(attachments: Sequence[Attachment]) -> str | None:
    """Attachments as they are stored.

    Raises:
        ConversationError: there are too many, or they are too long.
    """
    kept = [(valid_text(" ".join(each.name.split())), valid_text(each.text), each.image) for each in attachments]
    require_length(len(kept), MAX_ATTACHMENTS, "the message", unit="attachments")
    if long := next((name for name, *_ in kept if len(name) > MAX_TITLE), None):
        raise ConversationError(f"the name of an attachment has {len(long)} characters", f"at most {MAX_TITLE}")
    require_length(sum(len(text) for _, text, _ in kept), MAX_TEXT, "the attachments", have="have")
    images = [(name, image) for name, _, image in kept if image is not None]
    require_length(sum(len(image) for _, image in images), MAX_IMAGES, "the images", have="have")
    if bad := next((name for name, image in images if not _IMAGE.fullmatch(image)), None):
        raise ConversationError(f"the attachment {bad!r} is not an image", "images are data: URLs of PNG or JPEG files")
    return json.dumps(kept, ensure_ascii=False) if kept else None
