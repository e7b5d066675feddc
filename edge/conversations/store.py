"""The store of conversations: what the app and the terminal chat keep, in one file."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from ...models.data_folder import data_folder
from . import answer_table, conversation_table, message_table
from .database import ConversationDatabase, MemoryDatabase
from .message_search import search_messages, update_index
from .records import (
    Attachment,
    CallRound,
    Change,
    ChangeKind,
    Conversation,
    MessageState,
    ModelUsage,
    Preset,
    Role,
    SearchHit,
    StoredMessage,
)
from .writers import Writer

_log: Final = logging.getLogger(__name__)
FILE_NAME: Final = "conversations.sqlite3"
KEPT_DAYS: Final = 30
"""For how long deletions can be undone."""


class ConversationStore:
    """Conversations in a file. Any thread may call any method; other processes may have the file open as well.

    Every change is one transaction, which is on the disk when the method returns. Ids that are not known, or of what is
    deleted, raise a `ConversationError`, and so does a file that cannot be read or written.

    Args:
        path: the file; None for `conversations.sqlite3` in the user's data folder.
        notice: called with a sentence for the user, such as where a damaged file was set aside to.
        database: an open database in place of the file.

    Raises:
        ConversationError: the file cannot be read or written, was written by a newer edge-run, or is another program's.
    """

    def __init__(
        self,
        path: Path | None = None,
        notice: Callable[[str], None] = _log.warning,
        database: ConversationDatabase | None = None,
    ) -> None:
        self._database = database or ConversationDatabase(data_folder() / FILE_NAME if path is None else path, notice)
        self._writer: Final = Writer.of_this_process()
        self._listeners: list[Callable[[Change], None]] = []
        self._listeners_lock = threading.Lock()
        try:
            if self._database.write(lambda database: message_table.purge(database, time.time() - KEPT_DAYS * 86_400)):
                update_index(self._database)
            self._database.write(lambda database: answer_table.interrupt_abandoned(database, self._writer))
        except BaseException:
            self._database.close()
            raise

    @classmethod
    def open(cls, path: Path | None = None, notice: Callable[[str], None] = _log.warning) -> Self:
        """Open the file, which is created if necessary; arguments and errors as for the class.

        A file of an earlier version is brought to the present one, and a damaged one is set aside. Answers whose
        process has ended become `interrupted`; what was deleted more than 30 days ago is removed for good.
        """
        return cls(path, notice)

    @classmethod
    def in_memory(cls) -> Self:
        """A store that is gone when it is closed; nothing of it is written to a disk."""
        return cls(database=MemoryDatabase())

    @property
    def path(self) -> Path:
        """The file; `:memory:` for a store in memory."""
        return self._database.path

    # Conversations

    def conversations(self, deleted: bool = False) -> list[Conversation]:
        """Conversations, pinned ones first, then the latest; or the deleted ones."""
        return self._database.read(lambda database: conversation_table.list_conversations(database, deleted=deleted))

    def folders(self) -> list[str]:
        """Names of the folders that have conversations."""
        return self._database.read(conversation_table.list_folders)

    def conversation(self, conversation_id: str) -> Conversation:
        """The conversation with an id, also a deleted one."""
        return self._database.read(lambda database: conversation_table.read_conversation(database, conversation_id))

    def create(self, **fields: Any) -> Conversation:
        """Add a conversation.

        Args:
            **fields: any of `title` (without one, the first message of the user gives it), `folder`, `pinned`,
                `system`, `sampling`, `model`, `tools`, `allowed_tools`.
        """
        conversation = self._database.write(lambda database: conversation_table.create_conversation(database, fields))
        self._tell(ChangeKind.CONVERSATION, conversation.id)
        return conversation

    def change(self, conversation_id: str, **fields: Any) -> Conversation:
        """Set fields of a conversation: those of `create`. An empty title gives it back the one it gets by itself."""
        conversation = self._database.write(
            lambda database: conversation_table.change_conversation(database, conversation_id, fields)
        )
        self._tell(ChangeKind.CONVERSATION, conversation_id)
        return conversation

    def delete(self, conversation_id: str) -> None:
        """Delete a conversation; `restore` undoes it for 30 days."""
        self._database.write(
            lambda database: conversation_table.mark_conversation(database, conversation_id, deleted=True)
        )
        self._tell(ChangeKind.CONVERSATION_DELETED, conversation_id)

    def restore(self, conversation_id: str) -> Conversation:
        """Undo the deletion of a conversation."""
        conversation = self._database.write(
            lambda database: conversation_table.mark_conversation(database, conversation_id, deleted=False)
        )
        self._tell(ChangeKind.CONVERSATION, conversation_id)
        return conversation

    # Messages

    def messages(self, conversation_id: str) -> list[StoredMessage]:
        """All messages of a conversation, in the order in which they were added; their parents make them a tree."""
        messages = self._database.read(lambda database: message_table.list_messages(database, conversation_id))
        if any(message.state is MessageState.WRITING for message in messages) and self._interrupt_abandoned():
            messages = self._database.read(lambda database: message_table.list_messages(database, conversation_id))
        return messages

    def branch(self, leaf_id: str) -> list[StoredMessage]:
        """The messages from the first one to a given one."""
        return self._database.read(lambda database: message_table.list_branch(database, leaf_id))

    def message(self, message_id: str) -> StoredMessage:
        """The message with an id, also a deleted one."""
        return self._database.read(lambda database: message_table.read_message(database, message_id))

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
            parent_id: the message before it; None for a first message.
            role: `user` or `assistant`; an answer follows a message of the user.
            content: its text.
            attachments: text files that belong to it.
            model: the model that writes it.
            state: `writing` for an answer that this store will write with `write_answer` and `finish_answer`.
            rounds: calls of tools that an answer begins with.
        """
        message = self._database.write(
            lambda database: message_table.insert_message(
                database,
                conversation_id,
                parent_id,
                Role(role),
                content,
                attachments=attachments,
                model=model,
                state=state,
                rounds=rounds,
                writer=self._writer,
            )
        )
        self._tell(ChangeKind.MESSAGE, conversation_id, message.id)
        self._tell(ChangeKind.CONVERSATION, conversation_id)
        return message

    def rewrite(self, message_id: str, content: str) -> StoredMessage:
        """Replace the text of a message; what follows it stays, and the tokens of an answer are removed."""
        message = self._database.write(lambda database: message_table.rewrite_message(database, message_id, content))
        self._tell(ChangeKind.MESSAGE, message.conversation, message_id)
        return message

    def select_leaf(self, conversation_id: str, message_id: str) -> Conversation:
        """Show the branch of a message, down to the newest leaf below it."""
        conversation = self._database.write(
            lambda database: message_table.show_branch(database, conversation_id, message_id)
        )
        self._tell(ChangeKind.CONVERSATION, conversation_id)
        return conversation

    def delete_message(self, message_id: str) -> None:
        """Delete a message with all that follows it; `restore_message` undoes it for 30 days."""
        message = self._database.write(lambda database: message_table.mark_message(database, message_id))
        self._tell(ChangeKind.MESSAGE_DELETED, message.conversation, message_id)
        self._tell(ChangeKind.CONVERSATION, message.conversation)

    def restore_message(self, message_id: str) -> StoredMessage:
        """Undo the deletion of a message; what was deleted with it is there again, and its branch is shown."""
        message = self._database.write(lambda database: message_table.unmark_message(database, message_id))
        self._tell(ChangeKind.MESSAGE, message.conversation, message_id)
        self._tell(ChangeKind.CONVERSATION, message.conversation)
        return message

    # Answers

    def write_answer(
        self,
        message_id: str,
        content: str,
        tokens: Sequence[Mapping[str, Any]] | None = None,
        rounds: Sequence[CallRound] | None = None,
    ) -> None:
        """Keep an answer as far as it is written. One that was finished is `writing` again.

        Listeners are not told: what is new in an answer goes to windows by another way.

        Args:
            message_id: the answer.
            content: its whole text so far.
            tokens: all of its tokens so far, of which those that are stored are not written again; None leaves them.
            rounds: its calls of tools so far; None leaves those that are stored.

        Raises:
            ConversationError: also if the answer has been deleted, or another process writes it.
        """
        self._database.write(
            lambda database: answer_table.write_answer(database, message_id, content, tokens, self._writer, rounds)
        )

    def finish_answer(
        self,
        message_id: str,
        content: str,
        state: MessageState,
        *,
        tokens: Sequence[Mapping[str, Any]] | None = None,
        stats: Mapping[str, Any] | None = None,
        error: str | None = None,
    ) -> StoredMessage:
        """Keep a finished answer, also one that has been deleted meanwhile.

        Args:
            message_id: the answer.
            content: its whole text.
            state: how it ended.
            tokens: all of its tokens; None leaves those that `write_answer` stored.
            stats: statistics, a JSON object.
            error: why it failed, in a sentence.
        """
        message = self._database.write(
            lambda database: answer_table.end_answer(
                database,
                message_id,
                content,
                state,
                tokens=tokens,
                stats=stats,
                error=error,
                writer=self._writer,
            )
        )
        self._tell(ChangeKind.MESSAGE, message.conversation, message_id)
        self._tell(ChangeKind.CONVERSATION, message.conversation)
        return message

    def tokens(self, message_id: str) -> list[dict[str, Any]]:
        """The tokens of an answer; none if they were not stored."""
        return self._database.read(lambda database: answer_table.read_tokens(database, message_id))

    def usage(self) -> list[ModelUsage]:
        """What each model has done in the answers that are kept, also in deleted ones."""
        return self._database.read(answer_table.usage_by_model)

    # Search, presets, settings

    def search(self, text: str, limit: int = 50) -> list[SearchHit]:
        """Titles, then messages that contain all words of `text`, newest first; any text is a valid query."""
        return search_messages(self._database, text, limit)

    def presets(self) -> list[Preset]:
        """All presets, by name."""
        return self._database.read(conversation_table.list_presets)

    def save_preset(self, preset: Preset) -> None:
        """Add a preset, or replace that of the same name."""
        self._database.write(lambda database: conversation_table.put_preset(database, preset))
        self._tell(ChangeKind.PRESETS)

    def delete_preset(self, name: str) -> None:
        """Remove a preset."""
        self._database.write(lambda database: conversation_table.remove_preset(database, name))
        self._tell(ChangeKind.PRESETS)

    def setting(self, name: str, default: Any = None) -> Any:
        """A setting, which is a JSON value; the default if it was never set."""
        return self._database.read(lambda database: conversation_table.read_setting(database, name, default))

    def set_setting(self, name: str, value: Any) -> None:
        """Set a JSON value."""
        self._database.write(lambda database: conversation_table.put_setting(database, name, value))
        self._tell(ChangeKind.SETTINGS)

    # Export and import

    def export_markdown(self, conversation_id: str) -> str:
        """The branch that is shown, as Markdown; attachments are part of their messages."""
        from .transfer import as_markdown  # noqa: PLC0415  msgspec is needed for this alone

        def export(database: sqlite3.Connection) -> str:
            conversation = conversation_table.read_conversation(database, conversation_id)
            leaf = conversation.leaf
            return as_markdown(conversation, () if leaf is None else message_table.list_branch(database, leaf))

        return self._database.read(export)

    def export_json(self, ids: Sequence[str] | None = None, *, tokens: bool = False) -> str:
        """Conversations with all their branches, as JSON.

        Args:
            ids: the conversations; None for all that are not deleted.
            tokens: whether to write the tokens of answers, too; they are many times larger than the text.
        """
        from .transfer import as_json_file  # noqa: PLC0415  msgspec is needed for this alone

        def export(database: sqlite3.Connection) -> str:
            chosen = ids
            if chosen is None:
                chosen = [each.id for each in conversation_table.list_conversations(database, deleted=False)]
            return as_json_file(database, chosen, tokens=tokens)

        return self._database.read(export)

    def import_json(self, text: str) -> list[Conversation]:
        """Add the conversations of a text that `export_json` wrote: all of them or, if one is not valid, none."""
        from .transfer import insert_json_file  # noqa: PLC0415  msgspec is needed for this alone

        def insert(database: sqlite3.Connection) -> list[Conversation]:
            ids = insert_json_file(database, text)
            return [conversation_table.read_conversation(database, conversation_id) for conversation_id in ids]

        conversations = self._database.write(insert)
        for conversation in conversations:
            self._tell(ChangeKind.CONVERSATION, conversation.id)
        return conversations

    def import_markdown(self, text: str, name: str) -> Conversation:
        """Add a conversation from Markdown with headings as `export_markdown` writes them.

        Args:
            text: the text.
            name: name of the file, which is the title if the text has none.
        """
        from .transfer import read_markdown  # noqa: PLC0415  msgspec is needed for this alone

        read = read_markdown(text, name)

        def insert(database: sqlite3.Connection) -> Conversation:
            fields = {"title": read.title, "system": read.system}
            conversation_id = conversation_table.create_conversation(database, fields).id
            parent = None
            for message in read.messages:
                parent = message_table.insert_message(
                    database, conversation_id, parent, message.role, message.content, model=message.model
                ).id
            return conversation_table.read_conversation(database, conversation_id)

        conversation = self._database.write(insert)
        self._tell(ChangeKind.CONVERSATION, conversation.id)
        return conversation

    # Windows

    def changed_elsewhere(self) -> bool:
        """Whether another process (or another store in this one) has changed the file since the last call."""
        return self._database.changed_elsewhere()

    def listen(self, callback: Callable[[Change], None]) -> Callable[[], None]:
        """Call `callback` after every change that this store makes, in the thread that makes it.

        Returns:
            A function that ends it.
        """

        def end() -> None:
            with self._listeners_lock:
                if callback in self._listeners:
                    self._listeners.remove(callback)

        with self._listeners_lock:
            self._listeners.append(callback)
        return end

    def close(self) -> None:
        """Mark unfinished answers of this store as interrupted and close the file; a second call does nothing."""
        if not self._database.closed:
            try:
                self._database.write(lambda database: answer_table.interrupt_answers(database, str(self._writer)))
            finally:
                self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _interrupt_abandoned(self) -> bool:
        """Mark answers as interrupted whose process has ended meanwhile; whether there were any."""
        if not self._database.read(lambda database: answer_table.ended_writers(database, self._writer)):
            return False
        answers = self._database.write(lambda database: answer_table.interrupt_abandoned(database, self._writer))
        for conversation_id, message_id in answers:
            self._tell(ChangeKind.MESSAGE, conversation_id, message_id)
        return bool(answers)

    def _tell(self, kind: ChangeKind, conversation_id: str | None = None, message_id: str | None = None) -> None:
        with self._listeners_lock:
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener(Change(kind, conversation_id, message_id))
