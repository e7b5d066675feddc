"""Databases of other versions, and of other programs."""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest

from edgerun.edge.conversations import schema
from edgerun.edge.conversations.records import Attachment, Preset
from edgerun.edge.conversations.store import ConversationStore
from edgerun.errors import ConversationError

RECORDED = Path(__file__).with_name("version_1.sql")


@pytest.fixture
def version_1(tmp_path: Path) -> Path:
    """A database that version 1 wrote: two conversations, one of them deleted, with four messages."""
    path = tmp_path / "conversations.sqlite3"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(RECORDED.read_text(encoding="utf-8"))
    return path


def version_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return schema.version_of(connection)


def test_a_database_of_version_1_opens_with_everything(version_1: Path) -> None:
    with ConversationStore(version_1, pytest.fail) as store:
        (conversation,) = store.conversations()
        assert (conversation.title, conversation.folder, conversation.pinned) == ("How do I list files?", "work", True)
        question, first, second = store.messages(conversation.id)
        assert question.attachments == (Attachment("notes.txt", "one\ntwo\n"),)
        assert (first.content, second.content, conversation.leaf) == ("ls -l", "find . \u2013 größer", second.id)
        assert [token["text"] for token in store.tokens(first.id)] == ["ls"]
        assert [each.title for each in store.conversations(deleted=True)] == ["gone"]
        assert store.presets() == [Preset("short", "Be brief.", {"max_tokens": 50})]
        assert store.setting("theme") == "dark"
        # What this version added works for what was there before.
        assert [hit.message for hit in store.search("GRÖSSER größer")] == []
        assert [hit.message for hit in store.search("größer")] == [second.id]
        store.add_message(conversation.id, second.id, "user", "further")
        assert (conversation.tools, second.rounds) == ((), ())
        assert store.change(conversation.id, tools=["clock/now"]).tools == ("clock/now",)
    assert version_of(version_1) == schema.VERSION


def test_a_database_loses_the_full_text_index_that_version_3_had(version_1: Path) -> None:
    with closing(sqlite3.connect(version_1)) as connection:
        noted = "AFTER INSERT ON message BEGIN INSERT OR IGNORE INTO unindexed VALUES (new.number); END"
        for statement in (
            "CREATE TABLE unindexed (message INTEGER PRIMARY KEY)",
            f"CREATE TRIGGER message_added {noted}",
            *schema.STEPS[2],
            "PRAGMA user_version = 3",
        ):
            connection.execute(statement)
        with suppress(sqlite3.OperationalError):  # this build of Python has no FTS5
            connection.execute("CREATE VIRTUAL TABLE message_index USING fts5 (content, tokenize = 'trigram')")
    with ConversationStore(version_1, pytest.fail) as store:
        store.add_message(store.conversations()[0].id, None, "user", "more")
        assert len(store.search("more")) == 1
    with closing(sqlite3.connect(version_1)) as connection:
        names = {row[0] for row in connection.execute("SELECT name FROM sqlite_schema WHERE type != 'index'")}
    assert names == set(schema.TABLES)


def test_a_step_that_fails_leaves_the_version_before(version_1: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = (*schema.STEPS[1], "CREATE TABLE conversation (twice)")
    monkeypatch.setattr(schema, "STEPS", (schema.STEPS[0], broken))
    with pytest.raises(ConversationError, match="table conversation already exists"):
        ConversationStore(version_1, pytest.fail)
    assert version_of(version_1) == 1
    monkeypatch.undo()
    with ConversationStore(version_1, pytest.fail) as store:
        assert len(store.conversations()) == 1


def test_a_database_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "conversations.sqlite3"
    ConversationStore(path, pytest.fail).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
    before = path.read_bytes()
    said = f"was written by a newer edge-run: its version is {schema.VERSION + 1}, .*; update edge-run"
    with pytest.raises(ConversationError, match=said):
        ConversationStore(path, pytest.fail)
    assert path.read_bytes() == before


def test_a_database_of_another_program_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "conversations.sqlite3"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    with pytest.raises(ConversationError, match="is a database of another program; move it elsewhere"):
        ConversationStore(path, pytest.fail)
    with closing(sqlite3.connect(path)) as connection:
        assert [row[0] for row in connection.execute("SELECT name FROM sqlite_schema")] == ["theirs"]
