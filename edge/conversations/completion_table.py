"""The answers of models in the store: checkpoints, ends, tokens, and answers whose process has ended."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ...errors import ConversationError
from .conversation_table import as_json, reads, writes
from .message_table import MessageTable, checked_content, encoded_rounds, is_running
from .records import CallRound, ChangeKind, MessageState, Role, StoredMessage, valid_text

_COMPRESSION: Final = 1


class CompletionTable(MessageTable):
    """Answers that are being written, and what they were written with."""

    @writes
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
        if state is MessageState.WRITING:
            raise ConversationError(
                "a finished answer cannot be in the state writing", "give the state in which it ended"
            )
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

    def _insert_tokens(self, message_id: str, start: int, tokens: Sequence[Mapping[str, Any]]) -> None:
        """Store tokens of an answer, the first of which is its token number `start`."""
        if tokens:
            data = zlib.compress(as_json([dict(each) for each in tokens], "tokens").encode(), _COMPRESSION)
            self.insert_row("token_part", {"message": message_id, "start": start, "count": len(tokens), "tokens": data})

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

    @reads
    def ended_writers(self) -> list[str]:
        """Writers of unfinished answers whose process has ended."""
        writers = [row[0] for row in self.sql("SELECT DISTINCT writer FROM message WHERE writer IS NOT NULL")]
        return [each for each in writers if each != self.writer and not is_running(each)]

    def _require_writable(self, message: StoredMessage) -> None:
        if message.role is not Role.ASSISTANT:
            raise ConversationError(f"the message {message.id!r} is not an answer", "rewrite it instead")
        (current,) = self.sql("SELECT writer FROM message WHERE id = ?", message.id).fetchone()
        if current not in {None, self.writer} and is_running(current):
            raise ConversationError("this answer is being written by another window", "wait until it is finished")
