"""Work in the background: when it is done, when it waits, when it is begun again, and that it ends when it should."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from edgerun.errors import EdgeError
from edgerun.models.progress import Progress
from edgerun.runtime.scheduling import idle_thread
from edgerun.runtime.scheduling.idle_thread import IdleThread
from edgerun.runtime.scheduling.request_queue import RequestQueue
from support.waiting import wait_until

LONG_S = 1000.0


class Engine(RequestQueue):
    """A queue that says what a test wants."""

    running = 0
    waiting = 0


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_thread, "_IDLE_S", 0.0)
    monkeypatch.setattr(idle_thread, "_POLL_S", 0.002)


@pytest.fixture
def done() -> list[float]:
    """When the work was done."""
    return []


@pytest.fixture
def work(done: list[float]) -> Callable[[Progress], None]:
    return lambda _: done.append(time.monotonic())


def has_ended(thread: IdleThread) -> bool:
    return thread._thread is None


@pytest.mark.parametrize(("rest", "times"), [(None, 1), (0.0, 3)])
def test_work_is_done_once_or_whenever_it_is_wanted_and_the_thread_ends(
    done: list[float], work: Callable[[Progress], None], rest: float | None, times: int
) -> None:
    thread = IdleThread(Engine(), work, "work", rest=rest)
    for _ in range(3):
        thread.start()
        wait_until(lambda: has_ended(thread))
    assert len(done) == times
    assert thread.close()
    thread.start()
    assert has_ended(thread)


def test_work_waits_until_the_engine_is_idle(
    done: list[float], work: Callable[[Progress], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_thread, "_IDLE_S", 0.004)
    engine = Engine()
    engine.running = 1
    thread = IdleThread(engine, work, "work")
    thread.start()
    time.sleep(0.05)
    assert not done
    engine.running = 0
    wait_until(lambda: bool(done))
    assert thread.close()


def test_work_waits_between_its_steps_while_an_answer_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, steps = Engine(), list[str]()

    def work(progress: Progress) -> None:
        engine.waiting = 1
        monkeypatch.setattr(idle_thread, "_IDLE_S", 0.004)
        steps.append("before")
        progress("", 0.5)
        steps.append("after")

    thread = IdleThread(engine, work, "work")
    thread.start()
    wait_until(lambda: bool(steps))
    time.sleep(0.05)
    assert steps == ["before"]
    engine.waiting = 0
    wait_until(lambda: steps == ["before", "after"])
    thread.close()


def test_work_is_done_beside_answers_once_patience_ends(
    done: list[float], work: Callable[[Progress], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_thread, "_IDLE_S", LONG_S)
    engine = Engine()
    engine.running = 1
    thread = IdleThread(engine, work, "work", patience_s=0.01)
    thread.start()
    wait_until(lambda: bool(done))
    thread.close()


def test_rest_follows_work(done: list[float], work: Callable[[Progress], None]) -> None:
    thread = IdleThread(Engine(), lambda progress: (sum(range(100_000)), work(progress)), "work", rest=1e9)
    thread.start()
    wait_until(lambda: has_ended(thread))
    thread.start()
    time.sleep(0.02)
    assert len(done) == 1
    assert thread.close()


@pytest.mark.parametrize("error", [EdgeError("it broke"), MemoryError()])
def test_work_that_failed_is_begun_again_after_twice_the_time(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    attempts, waits = list[float](), list[float]()
    monkeypatch.setattr(idle_thread, "_RETRY_S", 0.02)

    def work(_: Progress) -> None:
        attempts.append(time.monotonic())
        if len(attempts) < 4:
            raise error

    thread = IdleThread(Engine(), work, "work")
    for _ in range(6):
        thread.start()
        wait_until(lambda: has_ended(thread))
        waits.append(thread._next_at - attempts[-1])
    assert len(attempts) == 4, "the work is done"
    assert all(wait >= 0.02 * 2**number for number, wait in enumerate(waits[:3]))


def test_closing_stops_the_work() -> None:
    working = threading.Event()

    def work(progress: Progress) -> None:
        working.set()
        while True:
            progress("", 0.0)
            time.sleep(0.001)

    thread = IdleThread(Engine(), work, "work", rest=0.0)
    thread.start()
    assert working.wait(120)
    assert not thread.close(), "the work was in progress"
    thread.start()
    assert not any(each.name == "work" for each in threading.enumerate())


def test_without_a_thread_the_work_is_left_to_a_later_call(
    done: list[float], work: Callable[[Progress], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    thread = IdleThread(Engine(), work, "work")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        thread.start()
    assert not done
    thread.start()
    wait_until(lambda: bool(done))
