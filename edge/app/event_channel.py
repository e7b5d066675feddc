"""Events for the windows that show the page, each with a bounded queue and a channel of its own."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from starlette.types import Receive, Scope, Send

from ..server.event_stream import EVENT_HEADERS, event

MAX_EVENTS: Final = 4096
"""Largest number of events that wait for one window."""
MAX_BYTES: Final = 8 << 20
"""Largest size of the events that wait for one window."""
_COMMENT: Final = b": the channel is open\n\n"


class EventChannel:
    """Hands events to all windows that listen, in the order in which they were published."""

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._listeners: Final[set[EventListener]] = set()
        self._closed = False

    @property
    def listening(self) -> bool:
        """Whether any window listens; in any thread."""
        return bool(self._listeners)

    def publish(self, kind: str, /, **fields: Any) -> None:
        """Hand an event to all windows; in any thread.

        Args:
            kind: the `type` of the event.
            **fields: its further fields, as JSON can have them.
        """
        if not self._listeners:
            return
        encoded = event({"type": kind, **fields})
        with self._lock:
            for listener in self._listeners:
                listener.put(encoded)

    @contextmanager
    def listen(self) -> Iterator[EventListener]:
        """Listen within the block; on an event loop."""
        listener = EventListener()
        with self._lock:
            self._listeners.add(listener)
            closed = self._closed
        if closed:
            listener.end()
        try:
            yield listener
        finally:
            with self._lock:
                self._listeners.discard(listener)

    def close(self) -> None:
        """End all listening; in any thread."""
        with self._lock:
            self._closed = True
            for listener in self._listeners:
                listener.end()


class EventListener:
    """The events that wait for one window; made on the event loop that takes them.

    A window that reads too slowly, or is suspended by its browser, loses its events and is told to fetch everything
    again.
    """

    def __init__(self) -> None:
        self._loop: Final = asyncio.get_running_loop()
        self._changed: Final = asyncio.Event()
        self._lock: Final = threading.Lock()
        self._events: Final[deque[bytes]] = deque()
        self._bytes = 0
        self._ended = False

    def put(self, encoded: bytes) -> None:
        """Add an event; in any thread."""
        with self._lock:
            if len(self._events) >= MAX_EVENTS or self._bytes + len(encoded) > MAX_BYTES:
                self._events.clear()
                self._bytes = 0
                encoded = event({"type": "reload"})
            self._events.append(encoded)
            self._bytes += len(encoded)
            first = len(self._events) == 1
        # The event loop that was told of an earlier event takes this one along.
        if first:
            self._wake()

    def end(self) -> None:
        """Let `take` return nothing after the events that wait; in any thread."""
        self._ended = True
        self._wake()

    async def take(self) -> bytes:
        """Wait for events and return all there are; empty after the end; on the event loop."""
        while True:
            ended = self._ended
            with self._lock:
                taken = b"".join(self._events)
                self._events.clear()
                self._bytes = 0
            if taken or ended:
                return taken
            await self._changed.wait()
            self._changed.clear()

    def _wake(self) -> None:
        # The loop may have been closed meanwhile; then nobody waits.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._changed.set)


class EventsEndpoint:
    """`GET /api/events`: an ASGI application that sends events until the window goes away or the channel is closed.

    Args:
        channel: the events.
        silence_s: seconds without an event after which a comment is sent, so that a window that is gone is noticed.
    """

    def __init__(self, channel: EventChannel, silence_s: float) -> None:
        self._channel: Final = channel
        self._silence_s: Final = silence_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events."""
        del scope
        with self._channel.listen() as listener:
            await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
            # The window knows that it listens before it fetches what it shows.
            await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
            sending = asyncio.create_task(self._send(listener, send))
            watching = asyncio.create_task(_gone(receive))
            try:
                await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (sending, watching):
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, listener: EventListener, send: Send) -> None:
        while True:
            try:
                async with asyncio.timeout(self._silence_s):
                    events = await listener.take()
            except TimeoutError:
                events = _COMMENT
            if not events:
                return
            await send({"type": "http.response.body", "body": events, "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
