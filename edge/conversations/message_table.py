"""Reads and changes the trees of messages, with the tokens of answers."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from ...errors import ConversationError, UnknownIdError
from .conversation_table import as_json, checked_line, insert_row, parsed, read_conversation
from .records import (
    MAX_ATTACHMENTS,
    MAX_TEXT,
    MAX_TITLE,
    Attachment,
    CallRound,
    Conversation,
    MessageState,
    Role,
    StoredMessage,
    new_id,
    rounds_object,
    rounds_of,
    title_of,
    valid_text,
)
from .writers import Writer

COLUMNS: Final = (
    "id, conversation, parent, role, content, attachments, created, model, state, error, stats, rounds, "
    "EXISTS (SELECT 1 FROM token_part WHERE token_part.message = message.id)"
)
_BRANCH: Final = f"""
    WITH RECURSIVE branch (ancestor, depth) AS (
        SELECT ?, 0
        UNION ALL
        SELECT parent, depth + 1 FROM message JOIN branch ON id = ancestor WHERE parent IS NOT NULL
    )
    SELECT {COLUMNS} FROM message JOIN branch ON id = ancestor ORDER BY depth DESC
"""  # noqa: S608
_BELOW: Final = """
    WITH RECURSIVE below (id) AS (
        SELECT ?
        UNION ALL
        SELECT message.id FROM message JOIN below ON message.parent = below.id WHERE message.deleted IS NULL
    )
"""


def read_message(database: sqlite3.Connection, message_id: str, *, live: bool = False) -> StoredMessage:
    """The message with an id, also a deleted one.

    Raises:
        ConversationError: there is none; or it or its conversation is deleted, and `live` asks for one that is not.
    """
    row = database.execute(
        f"""
        SELECT {COLUMNS}, deleted IS NOT NULL
            OR EXISTS (SELECT 1 FROM conversation WHERE id = message.conversation AND deleted IS NOT NULL)
        FROM message WHERE id = ?
        """,  # noqa: S608
        (message_id,),
    ).fetchone()
    if row is None:
        raise UnknownIdError("message", message_id, "it may have been deleted")
    if live and row[-1]:
        raise ConversationError(f"the message {message_id!r} is deleted", "restore it first")
    return as_message(row[:-1])


def list_messages(database: sqlite3.Connection, conversation_id: str) -> list[StoredMessage]:
    """All messages of a conversation that are not deleted, in the order in which they were added.

    Raises:
        ConversationError: there is no such conversation.
    """
    read_conversation(database, conversation_id)
    rows = database.execute(
        f"SELECT {COLUMNS} FROM message WHERE conversation = ? AND deleted IS NULL ORDER BY number",  # noqa: S608
        (conversation_id,),
    )
    return [as_message(row) for row in rows]


def list_branch(database: sqlite3.Connection, leaf_id: str) -> list[StoredMessage]:
    """The messages from a first one to `leaf_id`.

    Raises:
        ConversationError: there is no such message, or it is deleted.
    """
    read_message(database, leaf_id, live=True)
    return [as_message(row) for row in database.execute(_BRANCH, (leaf_id,))]


def insert_message(
    database: sqlite3.Connection,
    conversation_id: str,
    parent_id: str | None,
    role: Role,
    content: str,
    *,
    attachments: Sequence[Attachment] = (),
    model: str | None = None,
    state: MessageState = MessageState.COMPLETE,
    rounds: Sequence[CallRound] = (),
    writer: Writer | None = None,
) -> StoredMessage:
    """Add a message, make it the leaf, and title an untitled conversation after it.

    Raises:
        ConversationError: the conversation or the parent is unknown or deleted, the parent is of another conversation,
            an answer has no message of a user to answer, or there is too much text.
    """
    conversation = read_conversation(database, conversation_id, live=True)
    parent = None if parent_id is None else read_message(database, parent_id, live=True)
    if parent is not None and parent.conversation != conversation_id:
        raise ConversationError(f"the message {parent_id!r} is of another conversation")
    if role is Role.ASSISTANT and (parent is None or parent.role is not Role.USER):
        raise ConversationError("an answer needs the message that it answers", "give the user's message as its parent")
    values: dict[str, Any] = {
        "id": new_id(),
        "conversation": conversation_id,
        "parent": parent_id,
        "role": role.value,
        "content": checked_content(content),
        "attachments": encoded_attachments(attachments),
        "created": time.time(),
        "model": None if model is None else checked_line(model, "model"),
        "state": state.value,
        "rounds": encoded_rounds(rounds),
        "writer": str(writer) if state is MessageState.WRITING else None,
    }
    insert_row(database, "message", values)
    if role is Role.USER and not conversation.title:
        title = title_of(content) or next((each.name for each in attachments), "")
        database.execute("UPDATE conversation SET title = ? WHERE id = ?", (valid_text(title), conversation_id))
    _show(database, conversation_id, values["id"], updated=True)
    return read_message(database, values["id"])


def rewrite_message(database: sqlite3.Connection, message_id: str, content: str) -> StoredMessage:
    """Replace the text of a message; its tokens, which are those of the former text, are removed.

    Raises:
        ConversationError: the message is unknown or deleted, or an answer that is being written.
    """
    message = read_message(database, message_id, live=True)
    if message.state is MessageState.WRITING:
        raise ConversationError("this answer is being written", "stop it first")
    database.execute("UPDATE message SET content = ? WHERE id = ?", (checked_content(content), message_id))
    database.execute("DELETE FROM token_part WHERE message = ?", (message_id,))
    touch(database, message.conversation)
    return read_message(database, message_id)


def show_branch(database: sqlite3.Connection, conversation_id: str, message_id: str) -> Conversation:
    """Make the newest leaf below a message the one that is shown.

    Raises:
        ConversationError: the message is unknown, deleted or of another conversation.
    """
    if read_message(database, message_id, live=True).conversation != conversation_id:
        raise ConversationError(f"the message {message_id!r} is of another conversation")
    _show(database, conversation_id, newest_leaf(database, message_id))
    return read_conversation(database, conversation_id)


def mark_message(database: sqlite3.Connection, message_id: str) -> StoredMessage:
    """Delete a message with all that follows it; the newest remaining branch is shown.

    Raises:
        ConversationError: there is no such message, or its conversation is deleted.
    """
    message = read_message(database, message_id)
    (deleted,) = database.execute("SELECT deleted FROM message WHERE id = ?", (message_id,)).fetchone()
    if deleted is not None:
        return message
    conversation = read_conversation(database, message.conversation, live=True)
    leaf = conversation.leaf
    shown = leaf is not None and any(each.id == message_id for each in list_branch(database, leaf))
    database.execute(
        f"{_BELOW} UPDATE message SET deleted = ?, deleted_with = ? WHERE id IN below",  # noqa: S608
        (message_id, time.time(), message_id),
    )
    if shown:
        _show(database, message.conversation, _nearest_leaf(database, message))
    return message


def unmark_message(database: sqlite3.Connection, message_id: str) -> StoredMessage:
    """Undo the deletion of a message: everything that was deleted with it is there again, and shown.

    Raises:
        ConversationError: there is no such message, or what it follows is deleted.
    """
    message = read_message(database, message_id)
    (group,) = database.execute("SELECT deleted_with FROM message WHERE id = ?", (message_id,)).fetchone()
    if group is None:
        return message
    read_conversation(database, message.conversation, live=True)
    parent = read_message(database, group).parent
    if parent is not None:
        read_message(database, parent, live=True)
    database.execute("UPDATE message SET deleted = NULL, deleted_with = NULL WHERE deleted_with = ?", (group,))
    _show(database, message.conversation, newest_leaf(database, message_id))
    return message


def purge(database: sqlite3.Connection, before: float) -> bool:
    """Remove for good what was deleted before a time; whether there was anything."""
    conversations = database.execute("DELETE FROM conversation WHERE deleted < ?", (before,)).rowcount
    messages = database.execute("DELETE FROM message WHERE deleted < ?", (before,)).rowcount
    return conversations + messages > 0


def as_message(row: Sequence[Any]) -> StoredMessage:
    """The message of a row of `COLUMNS`."""
    ident, conversation, parent, role, content, attachments, created, model, state, error, stats, rounds, has_tokens = (
        row
    )
    return StoredMessage(
        ident,
        conversation,
        parent,
        Role(role),
        content,
        tuple(Attachment(str(each[0]), str(each[1])) for each in parsed(attachments, [])),
        created,
        model,
        MessageState(state),
        error,
        parsed(stats, None),
        bool(has_tokens),
        rounds_of(parsed(rounds, ())),
    )


def checked_content(content: str) -> str:
    """The text of a message as it is stored.

    Raises:
        ConversationError: it is too long.
    """
    if len(content) > MAX_TEXT:
        raise ConversationError(f"the message has {len(content)} characters", f"at most {MAX_TEXT} are kept")
    return valid_text(content)


def encoded_rounds(rounds: Sequence[CallRound]) -> str | None:
    """Rounds of calls as they are stored.

    Raises:
        ConversationError: they are too long.
    """
    if not rounds:
        return None
    text = as_json(rounds_object(rounds), "the calls of tools")
    if len(text) > MAX_TEXT:
        raise ConversationError(
            f"the calls of tools and their results have {len(text)} characters", f"at most {MAX_TEXT} are kept"
        )
    return text


def encoded_attachments(attachments: Iterable[Attachment]) -> str | None:
    """Attachments as they are stored.

    Raises:
        ConversationError: there are too many, or they are too long.
    """
    pairs = [(valid_text(" ".join(each.name.split())), valid_text(each.text)) for each in attachments]
    if len(pairs) > MAX_ATTACHMENTS:
        raise ConversationError(f"the message has {len(pairs)} attachments", f"at most {MAX_ATTACHMENTS} are kept")
    if long := next((name for name, _ in pairs if len(name) > MAX_TITLE), None):
        raise ConversationError(f"the name of an attachment has {len(long)} characters", f"at most {MAX_TITLE}")
    if (size := sum(len(text) for _, text in pairs)) > MAX_TEXT:
        raise ConversationError(f"the attachments have {size} characters", f"at most {MAX_TEXT} are kept")
    return json.dumps(pairs, ensure_ascii=False) if pairs else None


def _show(database: sqlite3.Connection, conversation_id: str, leaf: str | None, *, updated: bool = False) -> None:
    database.execute("UPDATE conversation SET leaf = ? WHERE id = ?", (leaf, conversation_id))
    if updated:
        touch(database, conversation_id)


def touch(database: sqlite3.Connection, conversation_id: str) -> None:
    """Note that a message of the conversation was written now."""
    database.execute("UPDATE conversation SET updated = ? WHERE id = ?", (time.time(), conversation_id))


def newest_leaf(database: sqlite3.Connection, message_id: str) -> str:
    """The message that is reached by following the newest message from each one on."""
    leaf = message_id
    while row := database.execute(
        "SELECT id FROM message WHERE parent = ? AND deleted IS NULL ORDER BY number DESC LIMIT 1", (leaf,)
    ).fetchone():
        leaf = row[0]
    return leaf


def _nearest_leaf(database: sqlite3.Connection, message: StoredMessage) -> str | None:
    """The newest leaf beside a deleted message, or the message before it if there is none."""
    if message.parent is not None:
        return newest_leaf(database, message.parent)
    row = database.execute(
        "SELECT id FROM message WHERE conversation = ? AND parent IS NULL AND deleted IS NULL ORDER BY number DESC",
        (message.conversation,),
    ).fetchone()
    return None if row is None else newest_leaf(database, row[0])
