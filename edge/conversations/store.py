"""The store of conversations: what the app and the terminal chat keep, in one file."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, Self

from ...models.user_folders import data_folder
from .completion_table import CompletionTable
from .conversation_table import reads, writes
from .database import IN_MEMORY, ConversationDatabase
from .message_search import search_messages, update_index
from .records import ChangeKind, Conversation, MessageState, SearchHit, StoredMessage
from .transfer import as_json_file, as_markdown, insert_conversation, read_json, read_markdown

_log: Final = logging.getLogger(__name__)
FILE_NAME: Final = "conversations.sqlite3"
KEPT_DAYS: Final = 30
"""For how long deletions can be undone."""


class ConversationStore(CompletionTable, AbstractContextManager["ConversationStore"]):
    """Conversations in a file. Any thread may call any method; other processes may have the file open as well.

    A file of an earlier version is brought to the present one, and a damaged one is set aside. Answers whose process
    has ended become `interrupted`; what was deleted more than 30 days ago is removed for good.

    Every change is one transaction, which is on the disk when the method returns. Ids that are not known, or of what is
    deleted, raise a `ConversationError`, and so does a file that cannot be read or written.

    Args:
        path: the file, which is created if necessary; None for `conversations.sqlite3` in the user's data folder.
        notice: called with a sentence for the user, such as where a damaged file was set aside to.

    Raises:
        ConversationError: the file cannot be read or written, was written by a newer edge-run, or is another program's.
    """

    def __init__(self, path: Path | None = None, notice: Callable[[str], None] = _log.warning) -> None:
        super().__init__(ConversationDatabase(data_folder() / FILE_NAME if path is None else path, notice))
        try:
            if self._purge(time.time() - KEPT_DAYS * 86_400):
                update_index(self.database)
            self._interrupt_abandoned()
        except BaseException:
            self.database.close()
            raise

    @classmethod
    def in_memory(cls) -> Self:
        """A store that is gone when it is closed; nothing of it is written to a disk."""
        return cls(IN_MEMORY)

    @property
    def path(self) -> Path:
        """The file; `:memory:` for a store in memory."""
        return self.database.path

    def messages(self, conversation_id: str) -> list[StoredMessage]:
        """All messages of a conversation, in the order in which they were added; their parents make them a tree.

        Answers whose process has ended meanwhile become `interrupted`.
        """
        messages = super().messages(conversation_id)
        if any(message.state is MessageState.WRITING for message in messages) and self._interrupt_abandoned():
            messages = super().messages(conversation_id)
        return messages

    def search(self, text: str, limit: int = 50) -> list[SearchHit]:
        """Titles, then messages that contain all words of `text`, newest first; any text is a valid query."""
        return search_messages(self.database, text, limit)

    @reads
    def export_markdown(self, conversation_id: str) -> str:
        """The branch that is shown, as Markdown; attachments are part of their messages."""
        conversation = self.conversation(conversation_id)
        return as_markdown(conversation, () if conversation.leaf is None else self.branch(conversation.leaf))

    @reads
    def export_json(self, ids: Sequence[str] | None = None) -> str:
        """Conversations, or all that are not deleted, with all their branches but without tokens, as JSON."""
        return as_json_file(self, [each.id for each in self.conversations()] if ids is None else ids)

    @writes
    def import_json(self, text: str) -> list[Conversation]:
        """Add the conversations of a text that `export_json` wrote: all of them or, if one is not valid, none."""
        return [
            self._imported(insert_conversation(self, each, f"conversations[{index}]"))
            for index, each in enumerate(read_json(text))
        ]

    @writes
    def import_markdown(self, text: str, name: str) -> Conversation:
        """Add a conversation from Markdown with headings as `export_markdown` writes them.

        Args:
            text: the text.
            name: name of the file, which is the title if the text has none.
        """
        return self._imported(insert_conversation(self, read_markdown(text, name), name))

    def changed_elsewhere(self) -> bool:
        """Whether another process (or another store in this one) has changed the file since the last call."""
        return self.database.changed_elsewhere()

    def close(self) -> None:
        """Mark unfinished answers of this store as interrupted and close the file; a second call does nothing."""
        if not self.database.closed:
            try:
                self.interrupt_answers([self.writer])
            finally:
                self.database.close()

    def __exit__(self, *_error: object) -> None:
        self.close()

    @writes
    def _purge(self, before: float) -> bool:
        """Remove for good what was deleted before a time; whether there was anything."""
        conversations = self.sql("DELETE FROM conversation WHERE deleted < ?", before).rowcount
        return conversations + self.sql("DELETE FROM message WHERE deleted < ?", before).rowcount > 0

    def _interrupt_abandoned(self) -> bool:
        """Mark answers as interrupted whose process has ended meanwhile; whether there were any."""
        ended = self.ended_writers()
        return bool(ended) and self.interrupt_answers(ended)

    def _imported(self, conversation_id: str) -> Conversation:
        self.note(ChangeKind.CONVERSATION, conversation_id)
        return self.conversation(conversation_id)
