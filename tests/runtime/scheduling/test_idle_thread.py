"""Work in the background that fails is begun again, after longer and longer waits."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from edgerun.errors import EdgeError
from edgerun.models.progress import Progress
from edgerun.runtime.scheduling import idle_thread
from edgerun.runtime.scheduling.idle_thread import IdleThread
from edgerun.runtime.scheduling.request_queue import RequestQueue

LIMIT_S = 60.0


def test_work_that_failed_is_begun_again_after_twice_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    attempts: list[float] = []

    def work(_: Progress) -> None:
        attempts.append(now)
        if len(attempts) < 4:
            raise EdgeError("it broke")

    def begin() -> None:
        thread.start()
        begun = thread._thread
        assert begun is not None
        begun.join(LIMIT_S)

    monkeypatch.setattr(idle_thread, "_IDLE_S", 0.0)
    monkeypatch.setattr(idle_thread, "time", SimpleNamespace(monotonic=lambda: now))
    thread = IdleThread(RequestQueue(), work, "work")
    begin()
    for wait_s in (60.0, 120.0, 240.0):
        now += wait_s - 0.5
        begin()
        assert attempts[-1] < now
        now += 0.5
        begin()
        assert attempts[-1] == now
    now += 1e9
    begin()
    assert len(attempts) == 4, "the work is done"


def test_work_is_begun_once_and_not_after_the_end() -> None:
    queue, begun, go_on = RequestQueue(), threading.Event(), threading.Event()
    attempts: list[None] = []

    def work(_: Progress) -> None:
        attempts.append(None)
        begun.set()
        assert go_on.wait(LIMIT_S)

    thread = IdleThread(queue, work, "work")
    thread.start()
    assert begun.wait(LIMIT_S)
    thread.start()
    go_on.set()
    thread.close()
    thread.start()
    assert len(attempts) == 1
