"""The store of conversations: what the app and the terminal chat keep, in one file."""

from __future__ import annotations

import json
import logging
import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, Self

from ...errors import ConversationError
from ...models.user_folders import data_folder
from .conversation_table import as_json, reads, writes
from .database import IN_MEMORY, ConversationDatabase
from .message_table import MessageTable, checked_content, encoded_rounds, is_running
from .records import CallRound, ChangeKind, Conversation, MessageState, Role, SearchHit, StoredMessage, valid_text
from .transfer import as_json_file, as_markdown, insert_conversation, read_json, read_markdown

_log: Final = logging.getLogger(__name__)
FILE_NAME: Final = "conversations.sqlite3"
KEPT_DAYS: Final = 30
"""For how long deletions can be undone."""
_MOST_WORDS: Final = 16
_BEFORE: Final = 40
"""Characters of a snippet before the first place."""
_SNIPPET: Final = 160
_MARKS: Final = re.compile(
    r"^[ \t]*(?:`{3,}|~{3,}).*$"  # the fences of code
    r"|^[ \t]*(?:(?:#{1,6}|[-*+>])[ \t]+(?:\[[ xX]\][ \t]+)?)+"  # headings, lists, tasks and quotes
    r"|`+|\*\*+|~~"
    r"|(?<![\w*])\*(\w(?:[^*\n]*\w)?)\*(?![\w*])",  # emphasis: the asterisk of *.py is none
    re.MULTILINE,
)
"""Marks of Markdown, which snippets leave out; the first group is what stays."""


class ConversationStore(MessageTable, AbstractContextManager["ConversationStore"]):
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
            self._purge(time.time() - KEPT_DAYS * 86_400)
            self._interrupt_abandoned()
        except BaseException:
            self.database.close()
            raise

    @classmethod
    def in_memory(cls) -> Self:
        """A store that is gone when it is closed; nothing of it is written to a disk."""
        return cls(IN_MEMORY)

    def messages(self, conversation_id: str) -> list[StoredMessage]:
        """All messages of a conversation, in the order in which they were added; their parents make them a tree.

        Answers whose process has ended meanwhile become `interrupted`.
        """
        messages = super().messages(conversation_id)
        if any(message.state is MessageState.WRITING for message in messages) and self._interrupt_abandoned():
            messages = super().messages(conversation_id)
        return messages

    @writes
    def write_answer(
        self,
        message_id: str,
        content: str,
        tokens: Sequence[Mapping[str, Any]] | None = None,
        rounds: Sequence[CallRound] | None = None,
    ) -> None:
        """Keep an answer as far as it is written. One that was finished is `writing` again.

        The listener is not told: what is new in an answer goes to windows by another way.

        Args:
            message_id: the answer.
            content: its whole text so far.
            tokens: all of its tokens so far, of which those that are stored are not written again; None leaves them.
            rounds: its calls of tools so far; None leaves those that are stored.

        Raises:
            ConversationError: also if the answer has been deleted, or another process writes it.
        """
        self._require_writable(self.live_message(message_id))
        self.sql(
            "UPDATE message SET content = ?, state = 'writing', writer = ?, error = NULL WHERE id = ?",
            checked_content(content),
            self.writer,
            message_id,
        )
        if rounds is not None:
            self.sql("UPDATE message SET rounds = ? WHERE id = ?", encoded_rounds(rounds), message_id)
        if tokens is not None:
            counted = "SELECT ifnull(sum(count), 0) FROM token_part WHERE message = ?"
            (stored,) = self.sql(counted, message_id).fetchone()
            if stored > len(tokens):
                self.sql("DELETE FROM token_part WHERE message = ?", message_id)
                stored = 0
            self._insert_tokens(message_id, stored, tokens[stored:])

    @writes
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
        message = self.message(message_id)
        self._require_writable(message)
        self.sql(
            "UPDATE message SET content = ?, state = ?, writer = NULL, error = ?, stats = ? WHERE id = ?",
            checked_content(content),
            state.value,
            None if error is None else valid_text(error),
            None if stats is None else as_json(stats, "stats"),
            message_id,
        )
        if tokens is not None:
            self.sql("DELETE FROM token_part WHERE message = ?", message_id)
            self._insert_tokens(message_id, 0, tokens)
        self.touch(message.conversation)
        self.note(ChangeKind.MESSAGE, message.conversation, message_id)
        self.note(ChangeKind.CONVERSATION, message.conversation)
        return self.message(message_id)

    @reads
    def tokens(self, message_id: str) -> list[dict[str, Any]]:
        """The tokens of an answer, without those whose storage is damaged; none if they were not stored."""
        self.message(message_id)
        tokens: list[dict[str, Any]] = []
        for (data,) in self.sql("SELECT tokens FROM token_part WHERE message = ? ORDER BY start", message_id):
            try:
                tokens += json.loads(zlib.decompress(data))
            except (ValueError, zlib.error):
                break
        return tokens

    @reads
    def usage(self) -> list[dict[str, Any]]:
        """What each model has done in the answers that are kept, also in deleted ones; most tokens first.

        Returns:
            JSON objects: the `model`, its `answers`, the tokens of prompts that were `read`, without those that were in
            the KV cache already, and the `generated` ones.
        """
        rows = self.sql(
            """
            SELECT model, count(*),
                CAST(
                    total(json_extract(stats, '$.prompt_tokens')) - total(json_extract(stats, '$.reused_tokens'))
                    AS INTEGER
                ),
                CAST(total(json_extract(stats, '$.tokens')) AS INTEGER) AS generated
            FROM message WHERE role = 'assistant' AND json_valid(stats)
            GROUP BY model ORDER BY generated DESC, model
            """
        )
        return [dict(zip(("model", "answers", "read", "generated"), row, strict=True)) for row in rows]

    @reads
    def search(self, text: str, limit: int = 50) -> list[SearchHit]:
        """Titles, then messages that contain every word of `text` somewhere, also inside words; the newest first.

        Any text is a valid query. Deleted messages and conversations are not found. Upper and lower case are the same.
        """
        if not (words := query_words(text)):
            return []
        condition = " AND ".join(["holds({}, ?)"] * len(words))
        titles = f"""
            SELECT id, title, NULL, title FROM conversation
            WHERE deleted IS NULL AND {condition.replace("{}", "title")} ORDER BY updated DESC LIMIT ?
        """  # noqa: S608  words are bound as parameters
        messages = f"""
            SELECT message.conversation, title, message.id, message.content
            FROM message JOIN conversation ON conversation.id = message.conversation
            WHERE {condition.replace("{}", "message.content")}
                AND message.deleted IS NULL AND conversation.deleted IS NULL
            ORDER BY message.number DESC LIMIT ?
        """  # noqa: S608  words are bound as parameters
        rows = [row for statement in (titles, messages) for row in self.sql(statement, *words, limit)]
        return [
            SearchHit(conversation, title, message, title if message is None else snippet_of(content, words))
            for conversation, title, message, content in rows[:limit]
        ]

    @reads
    def export_markdown(self, conversation_id: str) -> str:
        """The branch that is shown, as Markdown; attachments are part of their messages."""
        return as_markdown(*self.shown(conversation_id))

    @reads
    def export_json(self, ids: Sequence[str] | None = None) -> str:
        """Conversations, or all that are not deleted, with all their branches but without tokens, as JSON."""
        return as_json_file(self, [each.id for each in self.conversations()] if ids is None else ids)

    @writes
    def import_json(self, text: str) -> list[Conversation]:
        """Add the conversations of a text that `export_json` wrote: all of them or, if one is not valid, none."""
        return [
            insert_conversation(self, each, f"conversations[{index}]") for index, each in enumerate(read_json(text))
        ]

    @writes
    def import_markdown(self, text: str, name: str) -> Conversation:
        """Add a conversation from Markdown with headings as `export_markdown` writes them.

        Args:
            text: the text.
            name: name of the file, which is the title if the text has none.
        """
        return insert_conversation(self, read_markdown(text, name), name)

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
    def interrupt_answers(self, writers: Sequence[str]) -> bool:
        """Mark the answers that writers have not finished as interrupted; whether there were any."""
        marks = ", ".join("?" * len(writers))
        answers = self.sql(f"SELECT conversation, id FROM message WHERE writer IN ({marks})", *writers).fetchall()  # noqa: S608
        self.sql(
            f"UPDATE message SET state = 'interrupted', writer = NULL WHERE writer IN ({marks})",  # noqa: S608
            *writers,
        )
        for conversation_id, message_id in answers:
            self.note(ChangeKind.MESSAGE, conversation_id, message_id)
        return bool(answers)

    @writes
    def _purge(self, before: float) -> None:
        """Remove for good what was deleted before a time."""
        self.sql("DELETE FROM conversation WHERE deleted < ?", before)
        self.sql("DELETE FROM message WHERE deleted < ?", before)

    def _interrupt_abandoned(self) -> bool:
        """Mark answers as interrupted whose process has ended meanwhile; whether there were any."""
        statement = "SELECT DISTINCT writer FROM message WHERE writer IS NOT NULL"
        writers = self.database.read(lambda connection: connection.execute(statement).fetchall())
        ended = [each for (each,) in writers if each != self.writer and not is_running(each)]
        return bool(ended) and self.interrupt_answers(ended)

    def _insert_tokens(self, message_id: str, start: int, tokens: Sequence[Mapping[str, Any]]) -> None:
        """Store tokens of an answer, the first of which is its token number `start`."""
        if tokens:
            data = zlib.compress(as_json([dict(each) for each in tokens], "tokens").encode(), level=1)
            self.insert_row("token_part", {"message": message_id, "start": start, "count": len(tokens), "tokens": data})

    def _require_writable(self, message: StoredMessage) -> None:
        if message.role is not Role.ASSISTANT:
            raise ConversationError(f"the message {message.id!r} is not an answer", "rewrite it instead")
        (current,) = self.sql("SELECT writer FROM message WHERE id = ?", message.id).fetchone()
        if current not in {None, self.writer} and is_running(current):
            raise ConversationError("this answer is being written by another window", "wait until it is finished")


def query_words(text: str) -> list[str]:
    """The words of a query, without repetition."""
    return list(dict.fromkeys(valid_text(text.replace("\0", " ")).split()))[:_MOST_WORDS]


def snippet_of(content: str, words: Sequence[str]) -> str:
    """A piece of the text around the first place with one of the words, on one line and without marks of Markdown.

    The marks stay where words of the query contain them.
    """
    folded = content.lower()
    places = [place for word in words if (place := folded.find(word.lower())) >= 0]
    start = max(0, min(places, default=0) - _BEFORE)
    end = start + 2 * _SNIPPET  # the marks take room too
    piece = content[start:end]
    plain = _MARKS.sub(r"\1", piece)
    if any(word.lower() in piece.lower() and word.lower() not in plain.lower() for word in words):
        plain = piece
    text = " ".join(plain.split())
    return ("…" if start else "") + text[:_SNIPPET] + ("…" if end < len(content) or len(text) > _SNIPPET else "")
