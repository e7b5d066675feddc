"""The request queue of an engine: how many answers are generated at a time, and which requests wait.

A few answers have a place and alternate: each runs one forward pass, then the next one does. Other requests wait for a
place, in order. Waiting can be cancelled; waiting that would deadlock raises an error instead.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Protocol, TypeAlias

from ...errors import BusyError, EdgeError
from ..result import Chunk

Chunks: TypeAlias = Generator[Chunk, None, None]

DEFAULT_PARALLEL: Final = 4
"""Answers that are generated at a time: each has a KV cache, and more of them make each one slower."""
DEFAULT_MAX_WAITING: Final = 64
POLL_S: Final = 0.05
"""Seconds after which a waiting thread looks for signals and cancellations."""


class QueuedStream(Protocol):
    """A stream that reads an answer."""

    reader: int
    """The thread that reads it."""

    def cancel(self) -> None:
        """End the answer after its current pass."""

    def close(self) -> None:
        """End the answer."""


class Ticket:
    """A request's entry in the queue.

    Args:
        stream: reads the answer. It may be dropped, and then gives up the place.
        owner: what only one answer may use at a time, such as a conversation, or a KV cache; None for nothing.
    """

    def __init__(self, stream: QueuedStream, owner: object | None = None) -> None:
        self.owner: Final = owner
        self._stream = weakref.ref(stream)
        self.cancelled = False
        """Whether the answer was asked to end."""
        self.waiting_reader: int | None = None
        """Who waits for this request's place just now."""
        self.used_turn = False
        """Whether a pass has run since the answer's turn began."""

    @property
    def stream(self) -> QueuedStream | None:
        """The stream; None once it is dropped."""
        return self._stream()

    @property
    def reader(self) -> int | None:
        """Who reads the stream; None once it is dropped."""
        stream = self._stream()
        return None if stream is None else stream.reader


class RequestQueue:
    """Gives places to requests, and turns to those that have one.

    Args:
        parallel: number of answers that are generated at a time.
        max_waiting: number of further requests that may wait.
    """

    def __init__(self, parallel: int = DEFAULT_PARALLEL, max_waiting: int = DEFAULT_MAX_WAITING) -> None:
        self.parallel: Final = parallel
        self.max_waiting: Final = max_waiting
        self._turns = TurnLock()
        """Held by the thread that runs a pass of the engine or changes what its answers share."""
        self._changed = threading.Condition()
        self._running: list[Ticket] = []
        self._waiting: list[Ticket] = []
        self._dropped: deque[tuple[Ticket, Chunks | None]] = deque()
        """Answers to end. A finalizer adds them, which may run in any thread and at any line, so it cannot wait."""
        self._closed = False

    @property
    def running(self) -> int:
        """Number of answers that have a place."""
        self._end_dropped()
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a place."""
        self._end_dropped()
        return len(self._waiting)

    def enter(self, ticket: Ticket) -> None:
        """Take a place, or one among the waiting requests; returns at once.

        Raises:
            BusyError: too many requests wait already.
            EdgeError: the engine is closed.
        """
        self._end_dropped()
        with self._changed:
            self._require_open()
            self._waiting.append(ticket)
            self._admit()
            if ticket in self._waiting and len(self._waiting) > self.max_waiting:
                self._waiting.remove(ticket)
                raise BusyError(
                    f"{len(self._running)} answers are being generated and {len(self._waiting)} requests wait",
                    "try again later",
                )

    def wait_for_place(self, ticket: Ticket, reader: int) -> bool:
        """Wait until a request that has entered has a place; False when it was cancelled meanwhile.

        Raises:
            EdgeError: the engine is closed, or all places are held by readers that wait themselves, which would
                deadlock.
        """
        try:
            while not ticket.cancelled:
                self._end_dropped()
                with self._changed:
                    if ticket in self._running:
                        return True
                    self._require_open()
                    ticket.waiting_reader = reader
                    self._check_deadlock(ticket, reader)
                    self._changed.wait(POLL_S)
        finally:
            ticket.waiting_reader = None
        return False

    def leave(self, ticket: Ticket) -> None:
        """Give up a place, or waiting for one."""
        with self._changed:
            for tickets in (self._running, self._waiting):
                if ticket in tickets:
                    tickets.remove(ticket)
            self._admit()

    @contextmanager
    def turn_of(self, ticket: Ticket) -> Iterator[None]:
        """`turn`, for a request that runs passes."""
        with self.turn():
            ticket.used_turn = False
            yield

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for the engine; other threads run no pass and change nothing that answers share during the block.

        A thread that has the turn already keeps it.
        """
        if self._turns.is_mine:
            yield
            return
        with self._turns:
            self._end_dropped()
            yield

    def pass_turn(self, ticket: Ticket) -> bool:
        """Let the others run a pass each, if this answer has run one in its turn; return whether it was cancelled.

        Called before every pass.
        """
        if ticket.used_turn:
            self._turns.pass_on()
            self._end_dropped()
        ticket.used_turn = True
        return ticket.cancelled

    def drop(self, ticket: Ticket, chunks: Chunks | None) -> None:
        """End an answer whose stream nobody reads any more, as soon as a thread uses the queue; returns at once."""
        ticket.cancelled = True
        self._dropped.append((ticket, chunks))

    def cancel(self) -> None:
        """End the answers being generated."""
        with self._changed:
            for ticket in self._running:
                ticket.cancelled = True

    def close(self) -> None:
        """End the answers being generated and refuse all others.

        Raises:
            EdgeError: it was called by something that an answer has called, such as a progress function.
        """
        if self._turns.is_mine:
            raise EdgeError("the engine cannot be closed from within an answer", "cancel the answer and close it then")
        with self._changed:
            self._closed = True
            streams = [ticket.stream for ticket in self._running]
            self._changed.notify_all()
        for stream in streams:
            if stream is not None:
                stream.close()
        while self.running:
            # Other threads are in the middle of these answers, which end before their next pass.
            with self._changed:
                self._changed.wait(POLL_S)

    def _end_dropped(self) -> None:
        """End the answers that were dropped. Where another thread has the turn, it does so when it can."""
        if not self._dropped:
            return
        mine = self._turns.is_mine
        if not mine and not self._turns.try_acquire():
            return
        try:
            for _ in range(len(self._dropped)):
                ticket, chunks = self._dropped.popleft()
                try:
                    if chunks is not None:
                        chunks.close()
                except ValueError:  # a thread is in the middle of it, and ends it before its next pass
                    self._dropped.append((ticket, chunks))
                else:
                    self.leave(ticket)
        finally:
            if not mine:
                self._turns.release()

    def _admit(self) -> None:
        """Give places to waiting requests, in order; one whose owner is in use lets the next one go first."""
        for ticket in tuple(self._waiting):
            if len(self._running) == self.parallel:
                break
            if ticket.owner is None or not self._in_use(ticket.owner):
                self._waiting.remove(ticket)
                self._running.append(ticket)
        self._changed.notify_all()

    def _in_use(self, owner: object) -> bool:
        return any(ticket.owner is owner for ticket in self._running)

    def _check_deadlock(self, ticket: Ticket, reader: int) -> None:
        """Raise if the answers that a request waits for are read by readers that wait themselves."""
        if ticket.owner is not None and any(
            each.owner is ticket.owner and each.reader == reader for each in self._running
        ):
            raise _deadlock()
        readers = [each.waiting_reader for each in self._waiting if each.waiting_reader is not None]
        if len(self._running) == self.parallel and all(each.reader in readers for each in self._running):
            raise _deadlock()

    def _require_open(self) -> None:
        if self._closed:
            raise EdgeError("this engine is closed", "load the model again")


def _deadlock() -> EdgeError:
    return EdgeError("the reader is in the middle of another answer", "finish or close that stream first")


class TurnLock:
    """A lock with a queue: releasing it gives it to the thread that has waited longest.

    An ordinary lock may be taken again by the thread that has just released it, any number of times. With this one, two
    threads that always want it alternate.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        """A lock for each waiting thread, released when the turn is given to it."""
        self._held = False
        self._holder: int | None = None

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread holds the lock."""
        return self._holder == threading.get_ident()

    def try_acquire(self) -> bool:
        """Take the lock if it is free; False if it is not."""
        with self._guard:
            return self._take()

    def acquire(self) -> None:
        """Wait for the lock."""
        with self._guard:
            if self._take():
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            while not turn.acquire(timeout=POLL_S):
                pass
        except BaseException:  # an interrupt: the turn may have been given to this thread already
            with self._guard:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                else:
                    self._give_to_next()
            raise
        self._holder = threading.get_ident()

    def release(self) -> None:
        """Give the lock to the thread that has waited longest."""
        with self._guard:
            self._give_to_next()

    def pass_on(self) -> None:
        """Let every thread that waits now have the lock once before this one, which holds it, has it again."""
        if not self._waiting:
            return
        self.release()
        interrupt: BaseException | None = None
        while True:
            try:
                self.acquire()
                break
            except BaseException as error:  # noqa: BLE001  raised below, once the caller holds the lock again
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def __enter__(self) -> TurnLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _take(self) -> bool:
        if self._held:
            return False
        self._held = True
        self._holder = threading.get_ident()
        return True

    def _give_to_next(self) -> None:
        self._holder = None
        if self._waiting:
            self._waiting.popleft().release()
        else:
            self._held = False
