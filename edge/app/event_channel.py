"""Events for the windows that show the page, each with a bounded queue and a channel of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from starlette.types import Receive, Scope, Send

from ...runtime.scheduling.request_run import LoopQueue
from ..server.http_messages import next_events, watching_client
from ..server.http_protocol import EVENT_HEADERS, event

MAX_EVENTS: Final = 4096
"""Largest number of events that wait for one window."""
MAX_BYTES: Final = 8 << 20
"""Largest size of the events that wait for one window."""
_COMMENT: Final = b": the channel is open\n\n"
_SILENCE_S: Final = 15.0
"""Seconds without an event after which a comment is sent, so that a window that is gone is noticed."""


class EventChannel:
    """Hands events to all windows that listen, in the order in which they were published.

    It is the ASGI application of `GET /api/events` too, which sends events until the window goes away or the channel is
    closed.
    """

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
            if self._closed:
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

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send events."""
        with self.listen() as listener:
            await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
            # The window knows that it listens before it fetches what it shows.
            await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
            async with watching_client(receive, listener.end):
                while events := await next_events(listener, _SILENCE_S, _COMMENT):
                    await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventListener(LoopQueue[bytes]):
    """The events that wait for one window.

    A window that reads too slowly, or is suspended by its browser, loses its events and is told to fetch everything
    again.
    """

    def _add(self, item: bytes) -> None:
        if len(self._items) >= MAX_EVENTS or sum(map(len, self._items)) + len(item) > MAX_BYTES:
            self._items, item = [], event({"type": "reload"})
        self._items.append(item)
