"""Damaged files, full disks, and folders that cannot be written."""

from __future__ import annotations

import os
import random
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from edgerun.edge.conversations import database
from edgerun.edge.conversations.records import MessageState
from edgerun.edge.conversations.store import ConversationStore
from edgerun.errors import ConversationError

PAGE = 4096
WINDOWS_RULES = sys.platform == "win32" or "EDGERUN_WINDOWS_FILES" in os.environ


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with 40 conversations of 10 messages, all in the main file."""
    path = tmp_path_factory.mktemp("filled") / "conversations.sqlite3"
    fill(path, 40)
    return path.read_bytes()


@pytest.fixture
def path(tmp_path: Path, filled: bytes) -> Path:
    """A copy of that file."""
    path = tmp_path / "conversations.sqlite3"
    path.write_bytes(filled)
    return path


def fill(path: Path, conversations: int) -> None:
    with ConversationStore(path, pytest.fail) as store:
        for number in range(conversations):
            conversation = store.create(title=f"number {number}")
            parent = None
            for turn in range(5):
                question = store.add_message(conversation.id, parent, "user", f"question {turn} " * 20)
                answer = store.add_message(conversation.id, question.id, "assistant", f"answer {turn} " * 20)
                parent = answer.id
        token = {"id": 1, "text": "x", "logprob": 0.0, "top": [], "kind": "decoded", "drafter": None, "rejected": None}
        store.finish_answer(answer.id, "with tokens", MessageState.COMPLETE, tokens=[token])


def overwrite(path: Path, start: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)


def opened_after_damage(path: Path) -> tuple[ConversationStore, str]:
    """A store, and its one notice."""
    notices: list[str] = []
    store = ConversationStore(path, notices.append)
    (notice,) = notices
    return store, notice


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: overwrite(path, 0, b"not a database!!" * 8),
        lambda path: path.write_bytes(random.Random(1).randbytes(50_000)),
        lambda path: path.write_bytes(path.read_bytes()[: PAGE // 2]),
    ],
    ids=["header", "other content", "cut to half a page"],
)
def test_a_file_that_cannot_be_read_is_set_aside_whole(path: Path, damage: Callable[[Path], object]) -> None:
    damage(path)
    content = path.read_bytes()
    store, notice = opened_after_damage(path)
    with store:
        (kept,) = path.parent.glob("conversations.damaged-*.sqlite3")
        assert kept.read_bytes() == content
        assert str(kept) in notice
        assert "0 conversations with 0 messages could be read" in notice
        assert store.conversations() == []
        store.create(title="new")
    with ConversationStore(path, pytest.fail) as store:
        assert [each.title for each in store.conversations()] == ["new"]


@pytest.mark.parametrize("seed", range(6))
def test_what_can_be_read_of_a_damaged_file_is_there(path: Path, seed: int) -> None:
    chance = random.Random(seed)
    pages = path.stat().st_size // PAGE
    with closing(sqlite3.connect(path)) as connection:
        before = connection.execute("SELECT count(*) FROM message").fetchone()[0]
    overwrite(path, chance.randrange(pages // 4, pages - 3) * PAGE, chance.randbytes(2 * PAGE))
    content = path.read_bytes()
    store, notice = opened_after_damage(path)
    with store:
        (kept,) = path.parent.glob("conversations.damaged-*.sqlite3")
        assert kept.read_bytes() == content
        found = [store.messages(each.id) for each in store.conversations()]
        messages = [message for tree in found for message in tree]
        assert before // 2 <= len(messages) <= before
        assert f"{len(found)} conversations with {len(messages)} messages could be read" in notice
        for tree in found:
            assert all(message.parent is None or message.parent in {each.id for each in tree} for message in tree)
        for conversation in store.conversations():
            assert conversation.leaf is None or store.branch(conversation.leaf)
            store.import_json(store.export_json([conversation.id]))
        assert len(store.search("question", limit=10_000)) > 0
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


@pytest.mark.skipif(WINDOWS_RULES, reason="files in use cannot be replaced")
def test_damage_that_is_found_while_running(path: Path) -> None:
    notices: list[str] = []
    with ConversationStore(path, notices.append) as store, closing(sqlite3.connect(path)) as other:
        (conversation, *_) = store.conversations()
        # A change elsewhere makes the store read its pages again.
        other.execute("UPDATE conversation SET pinned = 1")
        other.commit()
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        root = other.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'message'").fetchone()[0]
        overwrite(path, (root - 1) * PAGE, b"\xff" * PAGE)
        added = store.add_message(conversation.id, None, "user", "after the damage")
        assert store.messages(conversation.id) == [added]
        assert store.database.changed_elsewhere()
        (notice,) = notices
        assert "40 conversations with 0 messages could be read" in notice
        assert len(list(path.parent.glob("conversations.damaged-*.sqlite3"))) == 1


@pytest.mark.skipif(not WINDOWS_RULES, reason="files in use can be replaced")
def test_a_damaged_file_that_another_program_uses_stays(path: Path) -> None:
    with closing(sqlite3.connect(path)) as other:
        other.execute("SELECT count(*) FROM message").fetchone()
        overwrite(path, 0, b"not a database!!")
        with pytest.raises(ConversationError, match="is damaged, and other programs use it; end them"):
            ConversationStore(path, pytest.fail)
    opened_after_damage(path)[0].close()


@pytest.mark.skipif(WINDOWS_RULES, reason="files in use cannot be replaced")
def test_text_that_cannot_be_decoded_is_damage(path: Path) -> None:
    notices: list[str] = []
    with ConversationStore(path, notices.append) as store, closing(sqlite3.connect(path)) as other:
        (conversation, *_) = store.conversations()
        other.execute("UPDATE message SET content = CAST(x'61ff62' AS TEXT) WHERE id = ?", (conversation.leaf,))
        other.commit()
        assert store.message(conversation.leaf or "").content == "a\ufffdb"
        (notice,) = notices
        assert "40 conversations with 400 messages could be read" in notice


def test_a_log_without_its_database_is_kept(path: Path) -> None:
    log = path.with_name("conversations.sqlite3-wal")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE conversation SET title = 'changed'")
        connection.commit()
        content = log.read_bytes()
    path.write_bytes(b"")
    log.write_bytes(content)
    with ConversationStore(path, pytest.fail) as store:
        assert store.conversations() == []
        (kept,) = path.parent.glob("conversations.damaged-*.sqlite3-wal")
        assert kept.read_bytes() == content


def test_a_replacement_that_was_killed_half_way_is_completed(path: Path) -> None:
    salvaged = path.with_name("conversations.sqlite3.salvaged")
    path.replace(salvaged)
    with ConversationStore(path, pytest.fail) as store:
        assert len(store.conversations()) == 40
    salvaged.write_bytes(b"older")
    with ConversationStore(path, pytest.fail) as store:
        assert len(store.conversations()) == 40
    assert not salvaged.exists()


def test_a_full_disk_is_one_line_and_loses_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = database.connect

    def connect_to_full_disk(path: Path, *, log: bool = True) -> sqlite3.Connection:
        connection = connect(path, log=log)
        connection.execute("PRAGMA max_page_count = 1")  # as many as there are
        return connection

    monkeypatch.setattr(database, "connect", connect_to_full_disk)
    with ConversationStore(path, pytest.fail) as store:
        (conversation, *_) = store.conversations()
        before = store.messages(conversation.id)
        with pytest.raises(ConversationError) as caught:
            store.add_message(conversation.id, None, "user", "x" * 1_000_000)
        assert str(caught.value) == f"{path}: the disk is full; free some space and try again"
        assert store.messages(conversation.id) == before
    monkeypatch.undo()
    with ConversationStore(path, pytest.fail) as store:
        store.add_message(conversation.id, None, "user", "x" * 1_000_000)


@pytest.mark.skipif(sys.platform == "win32", reason="files have other permissions there")
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConversationError) as caught:
        ConversationStore(tmp_path / "file" / "conversations.sqlite3", pytest.fail)
    assert str(caught.value) == (
        f"conversations cannot be kept in {tmp_path / 'file'}: it is not a folder; "
        "give yourself the permission to write there, or name another folder with EDGERUN_HOME"
    )
    if os.geteuid() != 0:  # nothing is forbidden to root
        (tmp_path / "folder").mkdir(mode=0o500)
        with pytest.raises(ConversationError, match="Permission denied"):
            ConversationStore(tmp_path / "folder" / "conversations.sqlite3", pytest.fail)


def test_what_was_deleted_long_ago_is_removed_when_the_file_is_opened(path: Path) -> None:
    with ConversationStore(path, pytest.fail) as store:
        first, second, *_ = store.conversations()
        branch = store.branch(second.leaf or "")
        store.delete(first.id)
        store.delete_message(branch[4].id)
    for days, there in ((29, True), (31, False)):
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("UPDATE conversation SET deleted = ? WHERE deleted > 0", (time.time() - days * 86400,))
            connection.execute("UPDATE message SET deleted = ? WHERE deleted > 0", (time.time() - days * 86400,))
            connection.commit()
        with ConversationStore(path, pytest.fail) as store:
            assert [each.id for each in store.conversations(deleted=True)] == [first.id] * there
            if there:
                store.message(branch[9].id)
            else:
                with pytest.raises(ConversationError, match="there is no message"):
                    store.message(branch[9].id)
            assert [each.id for each in store.messages(second.id)] == [each.id for each in branch[:4]]
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM message").fetchone() == (40 * 10 - 10 - 6,)
