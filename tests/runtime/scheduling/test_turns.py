"""The lock that threads get in the order in which they asked for it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from itertools import pairwise

from edgerun.runtime.scheduling.turn_lock import TurnLock
from support.waiting import wait_until


def started(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target)
    thread.start()
    return thread


def test_threads_that_always_want_it_alternate() -> None:
    turns, order, ready = TurnLock(), list[int](), threading.Barrier(3)

    def work(number: int) -> None:
        with turns:
            # All are there before the first one passes its turn on.
            for _ in range(50):
                order.append(number)
                turns.pass_on()

    turns.acquire()
    threads = [started(lambda number=number: (ready.wait(), work(number))) for number in range(2)]
    ready.wait()
    wait_until(lambda: len(turns.waiting) == 2)
    turns.release()
    for thread in threads:
        thread.join()
    assert sorted(order) == [0] * 50 + [1] * 50
    assert all(one != other for one, other in pairwise(order))


def test_those_who_wait_get_it_in_order() -> None:
    turns, order = TurnLock(), list[int]()
    turns.acquire()
    threads = []
    for number in range(5):

        def work(number: int = number) -> None:
            with turns:
                order.append(number)

        threads.append(started(work))
        wait_until(lambda number=number: len(turns.waiting) == number + 1)
    assert not turns.try_acquire()
    turns.release()
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4]
    assert turns.try_acquire()
    assert turns.is_mine


def test_passing_it_on_when_nobody_waits_keeps_it() -> None:
    turns = TurnLock()
    with turns:
        turns.pass_on()
        assert turns.is_mine
        assert not turns.try_acquire()
    assert not turns.is_mine


class Interrupt(BaseException):
    """Stands for what a signal raises in a thread."""


def interrupt(thread: threading.Thread) -> None:
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Interrupt))


def test_an_interrupted_thread_leaves_the_queue() -> None:
    turns, outcome = TurnLock(), list[str]()

    def work() -> None:
        try:
            turns.acquire()
        except Interrupt:
            outcome.append("interrupted")

    turns.acquire()
    thread = started(work)
    wait_until(lambda: len(turns.waiting) == 1)
    interrupt(thread)
    thread.join()
    assert outcome == ["interrupted"]
    assert not turns.waiting
    turns.release()
    assert turns.try_acquire()


def test_a_thread_that_is_interrupted_while_others_have_their_turn_raises_with_the_lock_held() -> None:
    """Its cleanup changes what answers share, so it must not begin before its turn."""
    turns, held, others_turn, go_on = TurnLock(), list[bool](), threading.Event(), threading.Event()

    def work() -> None:
        turns.acquire()
        others_turn.set()
        wait_until(lambda: len(turns.waiting) == 1)
        try:
            turns.pass_on()
        except Interrupt:
            held.append(turns.is_mine)
        turns.release()

    thread = started(work)
    others_turn.wait()
    turns.acquire()  # the thread passes its turn on to this one
    interrupt(thread)
    go_on.wait(0.2)  # several of its waits end, and the interrupt with them
    assert not held
    turns.release()
    thread.join()
    assert held == [True]
    assert turns.try_acquire()
