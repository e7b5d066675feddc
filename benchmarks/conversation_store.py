"""How long the store of conversations takes: opening, listing, reading, writing, searching.

Makes a file with many conversations and one of 500 messages, and times each operation several times in one process.
Prints medians in milliseconds, by the clock and of this process's processor time, which other programs disturb less,
and one JSON line.

Example: python benchmarks/conversation_store.py --conversations 2000
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from edgerun.edge.conversations.records import MessageState
from edgerun.edge.conversations.store import ConversationStore

_WORDS: Final = tuple(
    f"{first}{second}" for first in ("con", "per", "sta", "mo", "re") for second in ("duct", "ting", "a")
)
_BATCH: Final = 100
_LONG: Final = 500
"""Messages of the long conversation."""


def text(chance: random.Random, words: int) -> str:
    """A text of so many words."""
    return " ".join(chance.choice(_WORDS) + str(chance.randrange(500)) for _ in range(words))


def conversation(chance: random.Random, title: str, messages: int) -> dict[str, Any]:
    """A conversation as an exported file has it: short questions, long answers."""
    return {
        "title": title,
        "created": 1,
        "updated": 1,
        "messages": [
            {
                "id": str(number),
                "parent": str(number - 1) if number else None,
                "role": "assistant" if number % 2 else "user",
                "content": text(chance, 120 if number % 2 else 20),
                "created": 1,
            }
            for number in range(messages)
        ],
    }


def fill(store: ConversationStore, conversations: int, messages: int) -> str:
    """Add conversations, and a long one, whose id is returned."""
    chance = random.Random(1)
    for start in range(0, conversations, _BATCH):
        batch = [conversation(chance, f"number {start + each}", messages) for each in range(_BATCH)]
        store.import_json(json.dumps({"format": "edge-run conversations", "version": 1, "conversations": batch}))
    long = [conversation(chance, "long", _LONG)]
    file = {"format": "edge-run conversations", "version": 1, "conversations": long}
    return store.import_json(json.dumps(file))[0].id


def timed(times: int, operation: Callable[[], object]) -> tuple[float, float]:
    """Median milliseconds of several runs: by the clock, and of processor time."""
    measured: list[tuple[float, float]] = []
    for _ in range(times):
        start, used = time.perf_counter(), time.process_time()
        operation()
        measured.append((time.perf_counter() - start, time.process_time() - used))
    elapsed, processor = zip(*measured, strict=True)
    return 1e3 * statistics.median(elapsed), 1e3 * statistics.median(processor)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--messages", type=int, default=20, help="messages of each")
    parser.add_argument("--times", type=int, default=15)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "conversations.sqlite3"
        with ConversationStore(path) as store:
            long = fill(store, arguments.conversations, arguments.messages)
        results = {"open and close": timed(arguments.times, lambda: ConversationStore(path).close())}
        with ConversationStore(path) as store:
            results |= operations(store, long, arguments.times)
        size = path.stat().st_size
    table = Table("operation", "by the clock, ms", "processor time, ms", title=f"{size / 2**20:.0f} MiB")
    for name, medians in results.items():
        table.add_row(name, *(f"{each:.2f}" for each in medians))
    Console().print(table)
    print(json.dumps({"bytes": size, **results}))


def operations(store: ConversationStore, long: str, times: int) -> dict[str, tuple[float, float]]:
    """Milliseconds of the operations of an open store."""
    leaf = store.conversation(long).leaf
    assert leaf is not None  # noqa: S101
    question = store.add_message(long, leaf, "user", "and then?")
    answer = store.add_message(long, question.id, "assistant", "", state=MessageState.WRITING)
    token = {"id": 1, "text": "word ", "logprob": -0.5, "top": [{"id": 2, "text": "x", "logprob": -1.0}] * 5}
    tokens = [token | {"kind": "accepted", "drafter": "suffix", "rejected": None} for _ in range(2000)]
    counts = count(20, 20)
    return {
        "list the conversations": timed(times, store.conversations),
        f"messages of a conversation of {_LONG}": timed(times, lambda: store.messages(long)),
        f"branch of {_LONG}": timed(times, lambda: store.branch(leaf)),
        "search for a word that few messages have": timed(times, lambda: store.search("conduct17 moting23")),
        "search for a part that all have": timed(times, lambda: store.search("duct")),
        "search for two characters": timed(times, lambda: store.search("q7")),
        "add a message": timed(times, lambda: store.add_message(long, leaf, "user", "a question")),
        "checkpoint of an answer, 20 further tokens": timed(
            times, lambda: store.write_answer(answer.id, "word " * 2000, tokens[: next(counts)])
        ),
        "finish an answer of 2,000 tokens": timed(
            times, lambda: store.finish_answer(answer.id, "word " * 2000, MessageState.COMPLETE, tokens=tokens)
        ),
        "its tokens": timed(times, lambda: store.tokens(answer.id)),
        "rename a conversation": timed(times, lambda: store.change(long, title=f"title {next(counts)}")),
    }


if __name__ == "__main__":
    main()
