"""Writes the answers of models: checkpoints, ends, tokens, and answers whose process has ended."""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ...errors import ConversationError
from .conversation_table import as_json, insert_row
from .message_table import checked_content, encoded_rounds, read_message, touch
from .records import CallRound, MessageState, ModelUsage, Role, StoredMessage, valid_text
from .writers import Writer

_COMPRESSION: Final = 1


def write_answer(
    database: sqlite3.Connection,
    message_id: str,
    content: str,
    tokens: Sequence[Mapping[str, Any]] | None,
    writer: Writer,
    rounds: Sequence[CallRound] | None = None,
) -> None:
    """Store an answer as far as it is written.

    Args:
        database: the database.
        message_id: the answer; one that was finished before goes on.
        content: the whole text so far.
        tokens: all tokens so far, of which those that are stored are not written again; None to leave them.
        writer: who writes it.
        rounds: its calls of tools so far; None to leave them.

    Raises:
        ConversationError: the message is unknown, deleted, not an answer, or written by another process.
    """
    message = read_message(database, message_id, live=True)
    _require_writable(database, message, writer)
    database.execute(
        "UPDATE message SET content = ?, state = 'writing', writer = ?, error = NULL WHERE id = ?",
        (checked_content(content), str(writer), message_id),
    )
    if rounds is not None:
        database.execute("UPDATE message SET rounds = ? WHERE id = ?", (encoded_rounds(rounds), message_id))
    if tokens is not None:
        (stored,) = database.execute(
            "SELECT ifnull(sum(count), 0) FROM token_part WHERE message = ?", (message_id,)
        ).fetchone()
        if stored > len(tokens):
            database.execute("DELETE FROM token_part WHERE message = ?", (message_id,))
            stored = 0
        insert_tokens(database, message_id, stored, tokens[stored:])


def end_answer(
    database: sqlite3.Connection,
    message_id: str,
    content: str,
    state: MessageState,
    *,
    tokens: Sequence[Mapping[str, Any]] | None,
    stats: Mapping[str, Any] | None,
    error: str | None,
    writer: Writer,
) -> StoredMessage:
    """Store a finished answer, also if it has been deleted meanwhile; arguments and errors as for `write_answer`."""
    if state is MessageState.WRITING:
        raise ConversationError("a finished answer cannot be in the state writing", "give the state in which it ended")
    message = read_message(database, message_id)
    _require_writable(database, message, writer)
    database.execute(
        "UPDATE message SET content = ?, state = ?, writer = NULL, error = ?, stats = ? WHERE id = ?",
        (
            checked_content(content),
            state.value,
            None if error is None else valid_text(error),
            None if stats is None else as_json(stats, "stats"),
            message_id,
        ),
    )
    if tokens is not None:
        database.execute("DELETE FROM token_part WHERE message = ?", (message_id,))
        insert_tokens(database, message_id, 0, tokens)
    touch(database, message.conversation)
    return read_message(database, message_id)


def read_tokens(database: sqlite3.Connection, message_id: str) -> list[dict[str, Any]]:
    """The tokens of an answer, without those whose storage is damaged.

    Raises:
        ConversationError: there is no such message.
    """
    read_message(database, message_id)
    rows = database.execute("SELECT tokens FROM token_part WHERE message = ? ORDER BY start", (message_id,))
    tokens: list[dict[str, Any]] = []
    for (data,) in rows:
        try:
            tokens += json.loads(zlib.decompress(data))
        except (ValueError, zlib.error):
            break
    return tokens


def usage_by_model(database: sqlite3.Connection) -> list[ModelUsage]:
    """What each model has done, the one that has generated the most tokens first."""
    rows = database.execute(
        """
        SELECT model, count(*),
            CAST(
                total(json_extract(stats, '$.prompt_tokens')) - total(json_extract(stats, '$.reused_tokens')) AS INTEGER
            ),
            CAST(total(json_extract(stats, '$.tokens')) AS INTEGER) AS generated
        FROM message WHERE role = 'assistant' AND json_valid(stats)
        GROUP BY model ORDER BY generated DESC, model
        """
    )
    return [ModelUsage(*row) for row in rows]


def insert_tokens(
    database: sqlite3.Connection, message_id: str, start: int, tokens: Sequence[Mapping[str, Any]]
) -> None:
    """Store tokens of an answer, the first of which is its token number `start`."""
    if tokens:
        data = zlib.compress(as_json([dict(each) for each in tokens], "tokens").encode(), _COMPRESSION)
        insert_row(
            database, "token_part", {"message": message_id, "start": start, "count": len(tokens), "tokens": data}
        )


def interrupt_abandoned(database: sqlite3.Connection, own: Writer) -> list[tuple[str, str]]:
    """Mark answers as interrupted whose process has ended; return their conversations and ids."""
    return [each for text in ended_writers(database, own) for each in interrupt_answers(database, text)]


def ended_writers(database: sqlite3.Connection, own: Writer) -> list[str]:
    """Writers of unfinished answers whose process has ended."""
    writers = [row[0] for row in database.execute("SELECT DISTINCT writer FROM message WHERE writer IS NOT NULL")]
    return [text for text in writers if text != str(own) and not is_running(text)]


def interrupt_answers(database: sqlite3.Connection, writer: str) -> list[tuple[str, str]]:
    """Mark the answers that a writer has not finished as interrupted; return their conversations and ids."""
    rows = database.execute("SELECT conversation, id FROM message WHERE writer = ?", (writer,)).fetchall()
    database.execute("UPDATE message SET state = 'interrupted', writer = NULL WHERE writer = ?", (writer,))
    return rows


def is_running(writer: str) -> bool:
    """Whether the process of a writer still runs."""
    parsed_writer = Writer.parse(writer)
    return parsed_writer is not None and parsed_writer.is_running()


def _require_writable(database: sqlite3.Connection, message: StoredMessage, writer: Writer) -> None:
    if message.role is not Role.ASSISTANT:
        raise ConversationError(f"the message {message.id!r} is not an answer", "rewrite it instead")
    (current,) = database.execute("SELECT writer FROM message WHERE id = ?", (message.id,)).fetchone()
    if current not in {None, str(writer)} and is_running(current):
        raise ConversationError("this answer is being written by another window", "wait until it is finished")
