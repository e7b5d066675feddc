"""Nothing that was stored is lost when a process is killed."""

from __future__ import annotations

import json
import random
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from edgerun.edge.conversations.records import MessageState
from edgerun.edge.conversations.store import ConversationStore
from edgerun.errors import ConversationError
from support.conversation_writers import writing_process

MOST_LINES = 60
MOST_DELAY_S = 0.004


def written_until_killed(path: Path, chance: random.Random) -> list[dict[str, Any]]:
    """Let a process write conversations and kill it at a random moment; what it said that it had stored."""
    with writing_process("write_conversations", path) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(chance.randint(1, MOST_LINES))]
        time.sleep(chance.random() * MOST_DELAY_S)
        process.kill()
        lines += process.stdout.readlines()
        process.wait()
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def check(path: Path, stored: list[dict[str, Any]]) -> None:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    with ConversationStore(path, pytest.fail) as store:
        latest: dict[str, dict[str, Any]] = {}
        for line in stored:
            if "conversation" in line:
                assert store.conversation(line["conversation"]).title == "kept"
            elif "question" in line:
                assert store.message(line["question"]).content == "question " * 50
            else:
                latest[line["answer"]] = line
        for answer_id, line in latest.items():
            answer = store.message(answer_id)
            words = answer.content.count("word ")
            # One further step may have been stored that the process could not say any more.
            assert words in {line["words"], line["words"] + 1}
            assert answer.content == "word " * words
            assert store.tokens(answer_id) == [{"id": number} for number in range(words)]
            finished = MessageState.COMPLETE if words == 8 and answer.state is MessageState.COMPLETE else None
            assert answer.state is (MessageState.COMPLETE if line["finished"] else finished or MessageState.INTERRUPTED)
        for conversation in store.conversations():
            messages = store.messages(conversation.id)
            assert {message.parent for message in messages} <= {None, *(message.id for message in messages)}
            assert conversation.leaf is None or store.branch(conversation.leaf)[-1].id == conversation.leaf


@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.nightly)])
def test_nothing_is_lost_or_torn_when_the_writer_is_killed(tmp_path: Path, kills: int) -> None:
    path, chance = tmp_path / "conversations.sqlite3", random.Random(kills)
    stored: list[dict[str, Any]] = []
    for _ in range(kills):
        stored += written_until_killed(path, chance)
        check(path, stored)
    assert len(stored) >= kills


def test_an_answer_is_interrupted_only_after_its_writer_has_ended(store: ConversationStore) -> None:
    conversation = store.create()
    question = store.add_message(conversation.id, None, "user", "q")
    with writing_process("write_one_answer", store.database.path, conversation.id, question.id) as process:
        assert process.stdout is not None
        answer = json.loads(process.stdout.readline())["answer"]
        with ConversationStore(store.database.path, pytest.fail) as other:
            assert other.message(answer).state is MessageState.WRITING
        assert store.messages(conversation.id)[1].state is MessageState.WRITING
        with pytest.raises(ConversationError, match="being written by another window; wait until it is finished"):
            store.write_answer(answer, "mine")
        process.kill()
        process.wait()
    interrupted = store.messages(conversation.id)[1]
    assert (interrupted.state, interrupted.content) == (MessageState.INTERRUPTED, "so far")
    # It can be continued.
    store.write_answer(answer, "so far and further")
    assert store.finish_answer(answer, "so far and further.", MessageState.COMPLETE).content == "so far and further."
