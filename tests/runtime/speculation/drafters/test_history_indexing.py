"""Indexing in the background: when it happens, when it waits, and that it ends when it should."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edgerun.runtime.speculation.drafters import history
from edgerun.runtime.speculation.drafters.history import HistoryDrafter, HistoryIndexer
from edgerun.runtime.speculation.drafters.history_store import HistoryStore

LONG_S = 1000.0


def unexpected(text: str) -> None:
    pytest.fail(text)


@pytest.fixture
def store(tmp_path: Path) -> HistoryStore:
    return HistoryStore(tmp_path, 1 << 20, unexpected)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the seconds that the indexer waits; an engine is idle at once and no rest is needed unless given."""

    def set_waits(*, idle_s: float = 0.0, patience_s: float = LONG_S, rest: float = 0.0) -> None:
        monkeypatch.setattr(history, "_IDLE_S", idle_s)
        monkeypatch.setattr(history, "_PATIENCE_S", patience_s)
        monkeypatch.setattr(history, "_REST", rest)

    set_waits()
    return set_waits


def wait_until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + 120
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.002)


def stored(store: HistoryStore, indexer: HistoryIndexer, tokens: list[int]) -> None:
    assert store.append(tokens)
    indexer.conversation_stored()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "edge-run history"]


@pytest.mark.usefixtures("waits")
def test_a_stored_conversation_is_indexed_and_the_thread_ends(store: HistoryStore) -> None:
    indexer = HistoryIndexer(store)
    for number in range(3):
        stored(store, indexer, [1, 2, 3, number])
        wait_until(lambda: not threads())
        assert store.unindexed_tokens() == 0
    indexer.close()


@pytest.mark.usefixtures("waits")
def test_nothing_is_indexed_while_an_answer_is_generated(store: HistoryStore) -> None:
    indexer = HistoryIndexer(store)
    with indexer.answering():
        stored(store, indexer, [1, 2, 3])
        time.sleep(0.05)
        assert store.index is None
    wait_until(lambda: store.index is not None)
    indexer.close()


def test_an_answer_that_starts_meanwhile_is_waited_for(
    store: HistoryStore, waits: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    answers = threading.Event()
    started = threading.Event()

    def reindex(pause: Callable[[], None] = lambda: None) -> bool:
        started.set()
        answers.wait(120)
        pause()
        steps.append("after")
        return True

    monkeypatch.setattr(store, "reindex", reindex)
    indexer = HistoryIndexer(store)
    stored(store, indexer, [1, 2])
    started.wait(120)
    with indexer.answering():
        answers.set()
        time.sleep(0.02)
        assert steps == []
    wait_until(lambda: steps == ["after"])
    indexer.close()


def test_where_answers_follow_each_other_it_is_indexed_beside_them(
    store: HistoryStore, waits: Callable[..., None]
) -> None:
    waits(patience_s=0.01)
    indexer = HistoryIndexer(store)
    with indexer.answering():
        stored(store, indexer, [1, 2, 3])
        wait_until(lambda: store.index is not None)
    indexer.close()


def test_an_engine_is_not_idle_right_after_an_answer(store: HistoryStore, waits: Callable[..., None]) -> None:
    waits(idle_s=LONG_S)
    indexer = HistoryIndexer(store)
    with indexer.answering():
        pass
    stored(store, indexer, [1, 2, 3])
    time.sleep(0.02)
    assert store.index is None
    indexer.close()
    assert store.unindexed_tokens() == 0


def test_rest_follows_work(store: HistoryStore, waits: Callable[..., None]) -> None:
    waits(rest=1e9)
    indexer = HistoryIndexer(store)
    stored(store, indexer, [1, 2, 3])
    wait_until(lambda: not threads())
    stored(store, indexer, [4, 5, 6])
    time.sleep(0.02)
    assert store.unindexed_tokens() == 3
    indexer.close()
    assert store.unindexed_tokens() == 0


def test_a_little_of_much_is_not_indexed_at_the_end_but_by_a_later_process(
    store: HistoryStore, waits: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_FEW_TOKENS", 100)
    store.append(range(2000))
    store.reindex()
    waits(idle_s=LONG_S)
    indexer = HistoryIndexer(store)
    with indexer.answering():  # a new indexer counts as idle
        stored(store, indexer, [4, 5, 6])
    indexer.close()
    assert store.unindexed_tokens() == 3
    later = HistoryStore(tmp_path, 1 << 20, unexpected)
    waits()
    indexer = HistoryIndexer(later)
    stored(later, indexer, [7, 8, 9])
    wait_until(lambda: not threads())
    assert later.unindexed_tokens() == 0
    indexer.close()


@pytest.mark.usefixtures("waits")
def test_closing_stops_the_work(store: HistoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    working = threading.Event()
    calls: list[str] = []

    def reindex(pause: Callable[[], None] = lambda: None) -> bool:
        calls.append("began")
        working.set()
        while True:
            pause()
            time.sleep(0.001)

    monkeypatch.setattr(store, "reindex", reindex)
    indexer = HistoryIndexer(store)
    stored(store, indexer, [1, 2, 3])
    working.wait(120)
    indexer.close()
    assert not threads()
    assert calls == ["began"]
    indexer.close()


@pytest.mark.usefixtures("waits")
def test_without_a_thread_the_store_is_indexed_at_the_end(store: HistoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    indexer = HistoryIndexer(store)
    stored(store, indexer, [1, 2, 3])
    indexer.close()
    assert store.unindexed_tokens() == 0


@pytest.mark.usefixtures("waits")
def test_closing_indexes_what_another_process_left(store: HistoryStore) -> None:
    store.append([1, 2, 3])
    HistoryIndexer(store).close()
    assert store.unindexed_tokens() == 0


def test_a_drafter_keeps_its_index_until_the_next_answer(store: HistoryStore) -> None:
    drafter = HistoryDrafter(store, 100)
    drafter.reset([1, 2])
    store.append([1, 2, 3])
    store.reindex()
    assert drafter.candidates(drafter.state()) == []
    drafter.reset([1, 2])
    assert [candidate.token for candidate in drafter.candidates(drafter.state())] == [3]
