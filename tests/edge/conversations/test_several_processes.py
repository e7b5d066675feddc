"""Several processes with one file of conversations."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from edgerun.edge.conversations.store import ConversationStore
from support.conversation_writers import writing_process

WINDOWS_RULES = sys.platform == "win32" or "EDGERUN_WINDOWS_FILES" in os.environ


@pytest.mark.parametrize(
    ("processes", "messages"), [(2, 30), pytest.param(6, 300, marks=pytest.mark.nightly)], ids=["few", "many"]
)
def test_no_message_of_several_processes_is_lost(store: ConversationStore, processes: int, messages: int) -> None:
    conversation = store.create(title="shared")
    assert not store.database.changed_elsewhere()
    with ExitStack() as stack:
        writers = [
            stack.enter_context(
                writing_process("add_messages", store.database.path, conversation.id, f"writer{number}", str(messages))
            )
            for number in range(processes)
        ]
        for number in range(messages):  # this process writes, too
            leaf = store.conversation(conversation.id).leaf
            store.add_message(conversation.id, leaf, "user", f"here {number}")
        outputs = [writer.communicate()[0] for writer in writers]
        assert [writer.returncode for writer in writers] == [0] * processes
    stored = {message.id: message for message in store.messages(conversation.id)}
    assert len(stored) == (processes + 1) * messages
    for output in outputs:
        acknowledged = [json.loads(line)["message"] for line in output.splitlines()]
        assert len(acknowledged) == messages
        assert set(acknowledged) <= set(stored)
    contents = {message.content for message in stored.values()}
    assert {f"writer0 {number}{'!' * (number % 5 == 4)}" for number in range(messages)} <= contents
    # It is one tree, whose branches end at what is shown.
    assert all(message.parent is None or message.parent in stored for message in stored.values())
    leaf = store.conversation(conversation.id).leaf
    assert leaf is not None
    assert leaf not in {message.parent for message in stored.values()}
    assert len(store.search("writer0", limit=10_000)) == messages
    assert store.database.changed_elsewhere()
    assert not store.database.changed_elsewhere()


def test_threads_share_a_store(store: ConversationStore) -> None:
    conversation = store.create(title="shared")

    def work(name: str) -> int:
        for number in range(20):
            store.add_message(conversation.id, None, "user", f"{name} {number}")
            store.messages(conversation.id)
        return len(store.search(name))

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, ["first", "second", "third", "fourth"])) == [20] * 4
    assert len(store.messages(conversation.id)) == 80


@pytest.mark.skipif(WINDOWS_RULES, reason="files in use cannot be replaced")
def test_a_file_that_is_replaced_is_opened_again(store: ConversationStore, tmp_path: Path) -> None:
    backup = tmp_path / "backup.sqlite3"
    with ConversationStore(backup, pytest.fail) as other:
        other.create(title="from the backup")
    store.create(title="before")
    store.database.changed_elsewhere()
    backup.replace(store.database.path)
    assert store.database.changed_elsewhere()
    assert [each.title for each in store.conversations()] == ["from the backup"]
    store.database.path.unlink()
    assert store.conversations() == []
    store.create(title="new")
    with ConversationStore(store.database.path, pytest.fail) as other:
        assert [each.title for each in other.conversations()] == ["new"]


@pytest.mark.parametrize("damaged", [False, True], ids=["new", "damaged"])
def test_several_processes_open_a_file_at_the_same_moment(tmp_path: Path, damaged: bool) -> None:
    path = tmp_path / "conversations.sqlite3"
    if damaged:
        path.write_bytes(b"not a database" * 1000)
    with ExitStack() as stack:
        processes = [stack.enter_context(writing_process("open_and_add", path)) for _ in range(3)]
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
        outputs = [json.loads(process.communicate()[0]) for process in processes]
    assert sum(len(output["notices"]) for output in outputs) == damaged
    assert len(list(tmp_path.glob("*.damaged-*"))) == damaged
    with ConversationStore(path, pytest.fail) as store:
        assert {each.id for each in store.conversations()} == {output["conversation"] for output in outputs}
