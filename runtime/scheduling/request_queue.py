"""The request queue of an engine: how many answers are generated at a time, and which requests wait.

A few answers have a place, and the turn goes around among them: each prepares one forward pass in its turn, and who
first has the turn back runs those that were handed in, together. A pass that cannot be shared runs in its turn. Other
requests wait for a place, in order, and so do those whose KV caches do not fit in memory beside those of the others.
Waiting can be cancelled; waiting that would deadlock raises an error instead.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from ...errors import BusyError, EdgeError
from ..result import Chunk
from .turn_lock import POLL_S, TurnLock

Chunks: TypeAlias = Generator[Chunk, None, None]

DEFAULT_PARALLEL: Final = 4
"""Answers that are generated at a time: each has a KV cache, and more of them make each one slower."""
DEFAULT_MAX_WAITING: Final = 64
_GRACE_S: Final = 0.002
"""Seconds that a pass waits for answers whose readers are between two chunks: a fraction of a pass."""


class QueuedStream(Protocol):
    """A stream that reads an answer."""

    reader: int
    """The thread that reads it."""

    def cancel(self) -> None:
        """End the answer after its current pass."""

    def close(self) -> None:
        """End the answer."""


class TurnTaker:
    """Who runs passes in turns: an answer, or one of several that are generated to a prompt."""

    def __init__(self, *, steady: bool = False) -> None:
        self.steady: Final = steady
        """Whether nobody reads between its passes, so that others can wait for it as long as it takes."""
        self.cancelled = False
        """Whether it was asked to end."""
        self.used_turn = False
        """Whether a pass has run since its turn began."""


class Ticket(TurnTaker):
    """A request's entry in the queue.

    Args:
        stream: reads the answer. It may be dropped, and then gives up the place.
        owner: what only one answer may use at a time, such as a conversation, or a KV cache; None for nothing.
        cache_bytes: expected size of its KV caches.
    """

    def __init__(self, stream: QueuedStream, owner: object | None = None, cache_bytes: int = 0) -> None:
        super().__init__()
        self.owner: Final = owner
        self.cache_bytes: Final = cache_bytes
        self._stream = weakref.ref(stream)
        self.ended: Final[set[int]] = set()
        """The answers that are to end, of several to the prompt."""
        self.waiting_reader: int | None = None
        """Who waits for this request's place just now."""

    @property
    def stream(self) -> QueuedStream | None:
        """The stream; None once it is dropped."""
        return self._stream()

    @property
    def reader(self) -> int | None:
        """Who reads the stream; None once it is dropped."""
        stream = self._stream()
        return None if stream is None else stream.reader


@dataclass(eq=False)
class RequestQueue:
    """Gives places to requests, and turns to those that have one."""

    parallel: int = DEFAULT_PARALLEL
    """Number of answers that are generated at a time."""
    max_waiting: int = DEFAULT_MAX_WAITING
    """Number of further requests that may wait."""
    cache_bytes: float = math.inf
    """Bytes that the KV caches of the answers may take together; a single one may take more."""

    def __post_init__(self) -> None:
        self._turns = TurnLock()
        """Held by the thread that runs a pass of the engine or changes what its answers share."""
        self._changed = threading.Condition()
        self._running: list[Ticket] = []
        self._waiting: list[Ticket] = []
        self._dropped: deque[tuple[Ticket, Chunks | None]] = deque()
        """Answers to end. A finalizer adds them, which may run in any thread and at any line, so it cannot wait."""
        self._closed = False
        self._current: TurnTaker | None = None
        """Whose pass is next in this turn."""
        self._due: set[TurnTaker] = set()
        """Who is likely to hand in a pass soon."""
        self._handed_in: set[TurnTaker] = set()
        """Whose pass is handed in and has not run."""

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

    def leave(self, ticket: TurnTaker) -> None:
        """Give up a place, or waiting for one, or taking turns without one."""
        self._due.discard(ticket)
        self._handed_in.discard(ticket)
        if self._current is ticket:
            self._current = None  # a ticket refers to its owner's cache
        with self._changed:
            for tickets in (self._running, self._waiting):
                if isinstance(ticket, Ticket) and ticket in tickets:
                    tickets.remove(ticket)
            self._admit()

    @contextmanager
    def turn_of(self, taker: TurnTaker) -> Iterator[None]:
        """`turn`, for who runs passes."""
        with self.turn():
            taker.used_turn = False
            self._current = taker
            yield

    @contextmanager
    def without_turn(self) -> Iterator[None]:
        """Let others have the turn during the block, if this thread has it."""
        had_turn = self._turns.is_mine
        if had_turn:
            self._turns.release()
        try:
            yield
        finally:
            if had_turn:
                self._turns.acquire_again()

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

    def yield_turn(self, taker: TurnTaker) -> bool:
        """Let the others run a pass each, if this one has run one in its turn; return whether it was cancelled.

        Called before every pass.
        """
        if taker.used_turn:
            self._turns.pass_on()
            self._end_dropped()
        taker.used_turn = True
        self._due.discard(taker)
        self._current = taker
        return taker.cancelled

    def expect(self, takers: Iterable[TurnTaker]) -> None:
        """Let passes wait for the first ones of those who will take turns."""
        self._due.update(takers)

    def gather(self, is_done: Callable[[], bool]) -> None:
        """Let the others hand in their passes, in the thread that has the turn and has handed in its own.

        Those that wait for the turn get it once. Those that have handed in passes before and are between two chunks of
        text are waited for, a little: otherwise two answers would take turns, each always too late for the other's
        pass.

        Args:
            is_done: whether another thread has run the pass, or nobody else can join it.
        """
        taker = self._current
        if taker is None:
            return
        self._due.discard(taker)
        self._handed_in.add(taker)
        if not is_done():
            self._turns.pass_on()
        deadline = time.perf_counter() + _GRACE_S
        while not is_done() and self._due and not taker.cancelled:
            steady = any(each.steady and not each.cancelled for each in tuple(self._due))
            if not steady and time.perf_counter() >= deadline:
                self._due.clear()  # they are waited for again once they have handed in another pass
                break
            if self._turns.waiting:
                missing = len(self._due)
                self._turns.pass_on()
                if len(self._due) < missing:
                    deadline = time.perf_counter() + _GRACE_S
            else:
                with self.without_turn():
                    time.sleep(_GRACE_S / 40)
        self._current = taker  # others had the turn meanwhile
        self._due.add(taker)
        if taker in self._handed_in:  # it runs all passes now, and may hand in its next one before others see that
            self._due.update(self._handed_in)
            self._handed_in.clear()

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
                if not self._dropped:
                    break  # closing several answers lets others have the turn, and they end some too
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
            if ticket.owner is None or all(each.owner is not ticket.owner for each in self._running):
                taken = sum(each.cache_bytes for each in self._running)
                if self._running and taken + ticket.cache_bytes > self.cache_bytes:
                    break  # those behind it would keep it waiting for ever
                self._waiting.remove(ticket)
                self._running.append(ticket)
        self._changed.notify_all()

    def _check_deadlock(self, ticket: Ticket, reader: int) -> None:
        """Raise if the answers that a request waits for are read by readers that wait themselves."""
        owned = [each for each in self._running if ticket.owner is not None and each.owner is ticket.owner]
        readers = [each.waiting_reader for each in self._waiting if each.waiting_reader is not None]
        all_wait = bool(self._running) and all(each.reader in readers for each in self._running)
        if all_wait or any(each.reader == reader for each in owned):
            raise EdgeError("the reader is in the middle of another answer", "finish or close that stream first")

    def _require_open(self) -> None:
        if self._closed:
            raise EdgeError("this engine is closed", "load the model again")
