"""Processes that write conversations, and say on standard output what the store has acknowledged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgerun.edge.conversations.records import MessageState
from edgerun.edge.conversations.store import ConversationStore
from support.processes import started


@contextmanager
def writing_process(operation: str, path: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run an operation of this module in a process, which is killed at the end of the block if it still runs.

    Args:
        operation: name of a function below.
        path: the file of conversations.
        *arguments: further arguments of the function.
    """
    program = f"import sys; from support.conversation_writers import {operation}; {operation}(*sys.argv[1:])"
    command = [sys.executable, "-c", program, str(path), *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        yield process


def write_conversations(path: str) -> None:
    """Write conversations, one after the other, until the process is killed; every line is what is stored by then."""
    store = ConversationStore(Path(path))
    while True:
        conversation = store.create(title="kept")
        acknowledge(conversation=conversation.id)
        parent = None
        for _ in range(3):
            question = store.add_message(conversation.id, parent, "user", "question " * 50)
            acknowledge(question=question.id)
            answer = store.add_message(conversation.id, question.id, "assistant", "", state=MessageState.WRITING)
            acknowledge(answer=answer.id, words=0, finished=False)
            for words in range(1, 8):
                store.write_answer(answer.id, "word " * words, [{"id": number} for number in range(words)])
                acknowledge(answer=answer.id, words=words, finished=False)
            tokens = [{"id": number} for number in range(8)]
            store.finish_answer(answer.id, "word " * 8, MessageState.COMPLETE, tokens=tokens)
            acknowledge(answer=answer.id, words=8, finished=True)
            parent = answer.id


def write_one_answer(path: str, conversation_id: str, question_id: str) -> None:
    """Begin an answer, and go on living."""
    store = ConversationStore(Path(path))
    answer = store.add_message(conversation_id, question_id, "assistant", "so far", state=MessageState.WRITING)
    acknowledge(answer=answer.id)
    sys.stdin.read()


def add_messages(path: str, conversation_id: str, name: str, count: str) -> None:
    """Add messages to a conversation that other processes write as well, each below the leaf of that moment."""
    with ConversationStore(Path(path)) as store:
        for number in range(int(count)):
            leaf = store.conversation(conversation_id).leaf
            message = store.add_message(conversation_id, leaf, "user", f"{name} {number}")
            if number % 5 == 4:
                store.search(name)
                store.rewrite(message.id, f"{name} {number}!")
            acknowledge(message=message.id)


def open_and_add(path: str) -> None:
    """Wait for a line, open the store and add a conversation; say which, and what the notices were."""
    sys.stdin.readline()
    notices: list[str] = []
    with ConversationStore(Path(path), notices.append) as store:
        acknowledge(conversation=store.create(title="new").id, notices=notices)
        sys.stdin.read()


def acknowledge(**fields: Any) -> None:
    """Say what is stored."""
    print(json.dumps(fields), flush=True)
